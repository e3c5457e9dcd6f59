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

from stage.errors import PolicyError, is_control_character

PARTIAL_SUFFIX = ".partial"
MAX_COMPONENT_BYTES = 255  # NAME_MAX on every file system our users meet
MAX_PATH_BYTES = 1024  # PATH_MAX is 4096 (1024 on macOS), with the folder of the bundle

# Cc: control characters; Cs: lone surrogates (not UTF-8); Zl, Zp: line ends to some readers.
_FORBIDDEN_CATEGORIES = frozenset({"Cc", "Cs", "Zl", "Zp"})


def problem_with_path(path: str) -> str | None:
    """Why `path` may not be in a bundle; None if it may.

    A path is relative, POSIX-style and normal: no `.`, `..`, empty component or trailing slash. `%`
    is
    rejected: BagIt (RFC 8493, 2.1.3) wants it percent-encoded in its manifests, and `sha256sum -c`
    of coreutils does not decode that.
    """
    if not path:
        return "it is empty"
    for character in () if _is_plain(path) else path:
        if _is_forbidden(character):
            return f"it has the control character U+{ord(character):04X}"
    if path.startswith("/"):
        return "it is absolute"
    if "\\" in path:
        return "it has a backslash"
    if "%" in path:
        return "it has a `%`"
    if len(path.encode()) > MAX_PATH_BYTES:
        return f"it is longer than {MAX_PATH_BYTES} bytes"
    return next(
        (problem for part in path.split("/") if (problem := _problem_with_component(part))), None
    )


def _problem_with_component(part: str) -> str | None:
    if part == "":
        return "it has an empty component"
    if part in (".", ".."):
        return f"it has the component `{part}`"
    if part != part.strip():
        return f"`{part}` begins or ends with a space"
    if len(part.encode()) > MAX_COMPONENT_BYTES:
        return f"`{part[:40]}...` is longer than {MAX_COMPONENT_BYTES} bytes"
    if part.endswith(PARTIAL_SUFFIX):
        return f"`{PARTIAL_SUFFIX}` is the ending of unfinished files"
    return None


def _is_plain(text: str) -> bool:
    """Whether it is ASCII without control characters: a fast check, and nearly always true."""
    return text.isascii() and text.isprintable()


def _is_forbidden(character: str) -> bool:
    return (
        is_control_character(character) or unicodedata.category(character) in _FORBIDDEN_CATEGORIES
    )


_RENAME = "Give it another name where it comes from."


def check_path(path: str, what: str, remedy: str = _RENAME) -> None:
    """Raises for a path that may not be in a bundle.

    Args:
        what: the origin of the path, for the message ("model bert", "stage.lock").
        remedy: of the error.

    Raises:
        PolicyError: with the reason.
    """
    if problem := problem_with_path(path):
        raise PolicyError(
            f"{what}: the path {printable(path)} may not be in a bundle: {problem}.",
            remedy,
        )


def check_paths(paths: Collection[str], what: str, remedy: str = _RENAME) -> None:
    """`check_path` for many: tens of thousands of ordinary paths in milliseconds.

    Raises:
        PolicyError: for the first that may not be in a bundle.
    """
    if not _all_ordinary(paths):
        for path in paths:
            check_path(path, what, remedy)


def _all_ordinary(paths: Collection[str]) -> bool:
    """Whether all are so ordinary that they break no rule of `problem_with_path`: a fast check."""
    text = "/" + "/\n/".join(paths) + "/"
    return (
        text.isascii()
        and text.replace("\n", "").isprintable()
        and text.count("\n") == max(len(paths) - 1, 0)
        and not any(part in text for part in _NOT_ORDINARY)
        and max(map(len, paths), default=0) <= MAX_COMPONENT_BYTES
    )


# `//` is an empty component; `/.` also begins `/./` and `/../`; a space may end a component.
_NOT_ORDINARY = ("//", "/.", "\\", "%", " ", f"{PARTIAL_SUFFIX}/")


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
    if not (_is_plain(url) and " " not in url) and any(
        c.isspace() or _is_forbidden(c) for c in url
    ):
        return "it has a space or a control character"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        return str(error).lower()
    if parts.scheme not in ("http", "https"):
        return f"it begins with `{parts.scheme}:`, not with https:// or http://"
    return "it names no host" if not parts.hostname or port == 0 else None


def folded(path: str) -> str:
    """A path on a disk that ignores case and normalises (APFS, NTFS): equal ones are one file."""
    if path.isascii():
        return path.lower()
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", path).casefold())


def collisions(paths: Iterable[str]) -> list[tuple[str, str]]:
    """Pairs of paths that cannot exist together.

    These are paths listed twice, paths or folders that differ only in case or Unicode
    normalisation, and a file where another path needs a folder.
    """
    ordered = sorted(paths)
    if _stand_apart(ordered):
        return []
    seen: dict[str, str] = {}
    files: dict[str, str] = {}
    found: list[tuple[str, str]] = []
    for path in ordered:
        if (key := folded(path)) in files:
            found.append((files[key], path))
        files.setdefault(key, path)
    for path in ordered:
        parts = path.split("/")
        for depth in range(1, len(parts)):
            folder = "/".join(parts[:depth])
            key = folded(folder)
            if key in files:
                found.append((files[key], path))
            elif seen.setdefault(key, folder) != folder:
                found.append((seen[key] + "/", path))
    return found


def _stand_apart(paths: Collection[str]) -> bool:
    """Whether no two collide: a fast check for ASCII paths, False for others."""
    if not all(map(str.isascii, paths)):
        return False
    files = set(map(str.lower, paths))  # what `folded` does to ASCII
    folders = {path.rpartition("/")[0] for path in paths}
    while parents := {path.rpartition("/")[0] for path in folders} - folders:
        folders |= parents
    folded_folders = set(map(str.lower, folders))
    return (
        len(files) == len(paths)
        and len(folded_folders) == len(folders)
        and not files & folded_folders
    )


def check_collisions(paths: Iterable[str], what: str, remedy: str = _RENAME) -> None:
    """Raises for paths that would be one file on some disk.

    Raises:
        PolicyError: naming both.
    """
    if found := collisions(paths):
        first, second = found[0]
        more = f" ({len(found) - 1} more such pairs)" if len(found) > 1 else ""
        raise PolicyError(
            f"{what}: {printable(first)} and {printable(second)} would be the same file on a disk "
            f"that ignores case or normalises Unicode{more}.",
            remedy,
        )


def printable(path: str) -> str:
    """A path for a terminal: quoted, with control characters escaped."""
    return f"`{''.join(ascii(c)[1:-1] if _is_forbidden(c) else c for c in path)}`"


def names_a_local_path(text: str) -> bool:
    """Whether the name of a repository is a local path: `./x`, `../x`, `/x`, `~/x`."""
    return text.startswith(("./", "../", "/", "~/")) or text in (".", "..")
