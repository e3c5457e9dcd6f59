"""Addresses as they are asked, from addresses as they are locked: the secrets of private channels and indexes put back.

A lock has none. They stand in `environment.yml` (best as `${NAME}`), or in what pip is set up with on this machine.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit, urlunsplit

from stage.environment.addresses import userinfo, without_secrets
from stage.environment.spec import EnvironmentSpec
from stage.sources.environment.indexes import Indexes, choose_indexes
from stage.sources.http import origin_of


@dataclass(frozen=True)
class Asked:
    """How to ask for a file: an address, perhaps with a channel's token in it, and `user:password`. Never shown."""

    url: str
    login: str | None = None

    def __repr__(self) -> str:
        return f"Asked({without_secrets(self.url)!r})"


class PrivateAddresses:
    """The addresses to ask, for the packages of several environment files; each file is read once."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[EnvironmentSpec, Indexes] | None] = {}
        self._lock = threading.Lock()

    def of(self, url: str, spec_path: Path) -> Asked:
        """How to ask for a package of an environment. Where its file is not at hand, nothing is put back.

        Raises:
            UsageError: the file cannot be read, or names a variable that is not set.
        """
        with self._lock:
            if spec_path not in self._known:
                self._known[spec_path] = _read(spec_path)
            known = self._known[spec_path]
        if known is None:
            return Asked(url)
        asked = address_to_ask(url, *known)
        login = userinfo(asked)
        parts = urlsplit(asked)
        bare = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
        return Asked(bare, unquote(login) if login else None)


def _read(spec_path: Path) -> tuple[EnvironmentSpec, Indexes] | None:
    if not spec_path.is_file():
        return None
    spec = EnvironmentSpec.load(spec_path)
    return spec, choose_indexes(spec.pip, os.environ)


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
