"""Addresses of indexes and channels: `${NAME}` filled in for use, secrets taken out for keeping.

A user name, a password or a token may stand in `environment.yml` or in the environment; neither ever stands in a lock.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import urlsplit, urlunsplit

from stage.errors import UsageError

_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_CONDA_TOKEN = re.compile(r"^/t/[^/]+(?=/)")


def expand(text: str, variables: Mapping[str, str], place: str) -> str:
    """Fills in `${NAME}`, as pip and conda do.

    Raises:
        UsageError: a variable that is not set.
    """

    def value(match: re.Match[str]) -> str:
        if match[1] not in variables:
            raise UsageError(f"{place}: the variable {match[1]} is not set.", f"export {match[1]}=..., then again.")
        return variables[match[1]]

    return _VARIABLE.sub(value, text)


def without_secrets(url: str) -> str:
    """An address fit for a lock or a message: no user name, password, conda token (`/t/TOKEN/`) or query."""
    parts = urlsplit(url)
    if not parts.scheme or parts.scheme == "file":
        return url
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit((parts.scheme, host, _CONDA_TOKEN.sub("", parts.path), "", ""))


def userinfo(url: str) -> str | None:
    """`user:password` of an address, as written there; None if it has none."""
    before, at, _ = urlsplit(url).netloc.rpartition("@")
    return before if at else None
