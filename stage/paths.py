"""Which paths and names may be in a bundle.

These rules are applied when a bundle is written and again when it is read. A path that passes means
the same file on ext4, Lustre and APFS, fits on a line of a BagIt manifest, and never leaves the
bundle. The Hub accepts more: names with newlines, `~/.ssh`, two names that differ in case only.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Iterable
from urllib.parse import urlsplit

from stage.bundle.verifier import (
    PARTIAL_SUFFIX,
    collisions,
    folded,
    is_hidden,
    printable,
    problem_with_path,
)
from stage.errors import PolicyError

__all__ = ["PARTIAL_SUFFIX", "collisions", "folded", "printable", "problem_with_path"]
_RENAME = "Give it another name where it comes from."


def check_path(path: str, remedy: str = _RENAME) -> None:
    """Raises for a path that may not be in a bundle.

    Raises:
        PolicyError: with the reason.
    """
    if problem := problem_with_path(path):
        raise PolicyError(f"the path {printable(path)} may not be in a bundle: {problem}.", remedy)


def check_paths(paths: Collection[str], remedy: str = _RENAME) -> None:
    """`check_path` for many: tens of thousands of ordinary paths in milliseconds.

    Raises:
        PolicyError: for the first that may not be in a bundle.
    """
    for path in paths:
        check_path(path, remedy)


def problem_with_asset_name(name: str) -> str | None:
    """Why `name` cannot name an asset (a folder in `data/`, a key of run files); None if it can."""
    if problem := problem_with_path(name):
        return problem
    if "/" in name:
        return "it has a `/`"
    if name.startswith((".", "-")):
        return f"it begins with `{name[0]}`"
    if any(not (c.isalnum() or c in "._-") for c in name):
        return "only letters, digits, `.`, `_` and `-` may be in it"
    if name != unicodedata.normalize("NFC", name):
        return "it is not in Unicode normal form C"
    return None


def is_split_name(name: str) -> bool:
    """Whether `name` can name a split of a dataset: the rule of `datasets.naming`."""
    return re.fullmatch(r"\w+(\.\w+)*", name) is not None


def problem_with_address(url: str) -> str | None:
    """Why `url` is no valid http or https address; None if it is."""
    if any(c.isspace() or is_hidden(c) for c in url):
        return "it has a space or a control character"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        return str(error).lower()
    if parts.scheme not in ("http", "https"):
        begins = f" (but with `{parts.scheme}:`)" if parts.scheme else ""
        return f"it does not begin with https:// or http://{begins}"
    return "it names no host" if not parts.hostname or port == 0 else None


def check_collisions(paths: Iterable[str], remedy: str = _RENAME) -> None:
    """Raises for paths that would be one file on some disk.

    Raises:
        PolicyError: naming both.
    """
    if found := collisions(paths):
        first, second = found[0]
        more = f" ({len(found) - 1} more such pairs)" if len(found) > 1 else ""
        raise PolicyError(
            f"{printable(first)} and {printable(second)} would be the same file on a disk "
            f"that ignores case or normalises Unicode{more}.",
            remedy,
        )
