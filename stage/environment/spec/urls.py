"""URLs of indexes and channels, which may have a login in them or in a variable."""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import urlsplit

from stage.errors import UsageError

_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")


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


def userinfo(url: str) -> str | None:
    """`user:password` of a URL, as written there; None if it has none."""
    before, at, _ = urlsplit(url).netloc.rpartition("@")
    return before if at else None
