"""URLs of indexes and channels: replaces `${NAME}`, and removes secrets for locks and messages.

A user name, a password or a token may be in `environment.yml` or in a variable, never in a lock.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import urlsplit, urlunsplit

from stage.errors import UsageError

_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_CONDA_TOKEN = re.compile(r"^/t/[^/]+(?=/)")


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Replaces `${NAME}`, as pip and conda do.

    Raises:
        UsageError: a variable that is not set.
    """

    def value(match: re.Match[str]) -> str:
        if match[1] not in variables:
            raise UsageError(
                f"the variable {match[1]} is not set.",
                f"export {match[1]}=..., then again.",
            )
        return variables[match[1]]

    return _VARIABLE.sub(value, text)


def without_secrets(url: str) -> str:
    """A URL for a lock or a message: without login, conda token (`/t/TOKEN/`) and query."""
    parts = urlsplit(url)
    if not parts.scheme or parts.scheme == "file":
        return url
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit((parts.scheme, host, _CONDA_TOKEN.sub("", parts.path), "", ""))


def userinfo(url: str) -> str | None:
    """`user:password` of a URL, as written there; None if it has none."""
    before, at, _ = urlsplit(url).netloc.rpartition("@")
    return before if at else None
