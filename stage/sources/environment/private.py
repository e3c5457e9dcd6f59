"""Addresses as they are asked, from addresses as they are locked: the secrets of private channels and indexes put back.

A lock has none. They stand in `environment.yml` (best as `${NAME}`), or in what pip is set up with on this machine.
"""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import urlsplit, urlunsplit

from stage.environment.addresses import userinfo, without_secrets
from stage.environment.spec import EnvironmentSpec
from stage.sources.environment.indexes import Indexes
from stage.sources.http import origin_of


def address_to_ask(url: str, spec: EnvironmentSpec, indexes: Indexes) -> str:
    """The address to ask for a locked package: with its channel's token or password, or its index's password.

    A password goes to the scheme, host and port it was written for, and to no other.
    """
    for channel in spec.channels:
        clean = without_secrets(channel).rstrip("/")
        if clean != channel.rstrip("/") and url.startswith(f"{clean}/"):
            return channel.rstrip("/") + url.removeprefix(clean)
    parts = urlsplit(url)
    for index in _urls(indexes):
        login = userinfo(index)
        if login and origin_of(index) == origin_of(url):
            return urlunsplit((parts.scheme, f"{login}@{parts.netloc}", parts.path, parts.query, ""))
    return url


def _urls(indexes: Indexes) -> Iterable[str]:
    return (line.partition(" ")[2] for line in indexes.lines if "://" in line)
