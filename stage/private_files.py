"""Private files (keys, passwords, tokens) among a user's own.

An entry `path:` of a manifest that takes one is refused; a project travels without them.

They are recognised by the names that programs give to them, and by the first bytes of small files.
This is no search for secrets inside data. It catches the `path: .` that takes a `.env` file into a
bundle, which many users may copy. A pattern of `include` that names such a file takes it
(docs/adr/0005).
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from stage.errors import PolicyError
from stage.files import join_limited, read_start
from stage.paths import printable

_SHOWN = 8  # names in a message
MAX_SIZE = 64 * 2**10  # bytes: a key is smaller, even with a long chain of certificates
_HEAD = 512  # bytes: a key with a comment in front begins within them
_NAMES = {
    **dict.fromkeys(
        ("id_rsa", "id_dsa", "id_ecdsa", "id_ed25519", "id_ecdsa_sk", "id_ed25519_sk"),
        "a private key of ssh",
    ),
    **dict.fromkeys(
        (".netrc", "_netrc", ".pgpass", ".pypirc", ".git-credentials", ".htpasswd"), "passwords"
    ),
    **dict.fromkeys(("kaggle.json", "stored_tokens"), "a token"),
}
_SUFFIXES = {
    ".p12": "a key store",
    ".pfx": "a key store",
    ".kdbx": "passwords",
    ".ppk": "a private key of PuTTY",
}
_FOLDERS = {
    ".ssh": "keys and hosts of ssh",
    ".gnupg": "keys of GnuPG",
    ".aws": "credentials of AWS",
    ".kube": "credentials of Kubernetes",
}
_TEMPLATES = (".example", ".sample", ".template", ".dist", ".defaults")
_KEY_SUFFIXES = (".pem", ".key", ".crt", ".cer", ".pub", "")
_KEY = re.compile(
    rb"^(-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----|PuTTY-User-Key-File-\d)",
    re.MULTILINE,
)
_TOKEN = re.compile(rb"(hf_|gh[oprsu]_|github_pat_|glpat-)[A-Za-z0-9_-]{20,}\s*")


def private_part(path: str) -> str:
    """The folder or file in a path that makes it private: `.ssh` of `a/.ssh/config`."""
    *folders, name = path.split("/")
    return next((folder for folder in folders if folder.lower() in _FOLDERS), name)


def is_known_by_whole_name(path: str) -> bool:
    """Whether the whole name is known (`kaggle.json`, `.env`, the folder `.ssh`), not a suffix."""
    return private_by_name(path) is not None and not path.lower().endswith(tuple(_SUFFIXES))


def private_by_name(path: str) -> str | None:
    """The private content that a name indicates; None if it indicates none.

    Args:
        path: relative to the folder of the entry, POSIX.
    """
    *folders, name = path.lower().split("/")
    for folder in folders:
        if folder in _FOLDERS:
            return _FOLDERS[folder]
    if name in _NAMES:
        return _NAMES[name]
    if name in (".env", ".envrc") or (name.startswith(".env.") and not name.endswith(_TEMPLATES)):
        return "settings, often with passwords and tokens"
    return next((what for suffix, what in _SUFFIXES.items() if name.endswith(suffix)), None)


def private_by_first_bytes(file: Path, size: int) -> str | None:
    """The private content that the first bytes of a small file show; None if they show none.

    Args:
        size: of the file, in bytes.

    Raises:
        OSError: it cannot be read.
    """
    if not 0 < size <= MAX_SIZE:
        return None
    most = MAX_SIZE if file.suffix.lower() in _KEY_SUFFIXES else _HEAD
    data = read_start(file, min(most, size + 1))
    if _KEY.search(data):
        return "a private key"
    return "a token" if size <= _HEAD and _TOKEN.fullmatch(data) else None


def is_named(name: str, include: Sequence[str], *, whole: bool) -> bool:
    """Whether a pattern names this file or folder, not everything or every file of a type.

    Args:
        whole: only the whole name identifies the file. Then `*.json` does not name `kaggle.json`;
            otherwise `*.pem` names a key.
    """
    parts = {part for pattern in include for part in pattern.split("/")}
    naming = (part for part in parts if _has_letters(part) and not (whole and _is_suffix(part)))
    return name in parts or any(fnmatch.fnmatchcase(name, part) for part in naming)


def _has_letters(pattern: str) -> bool:
    """Whether the pattern has a letter or digit outside of character classes."""
    return any(character.isalnum() for character in re.sub(r"\[!?\]?[^]]*\]", "", pattern))


def _is_suffix(pattern: str) -> bool:
    """Whether there are only wildcards before the last dot, as in `*.json`."""
    stem = pattern.rpartition(".")[0]
    return stem != "" and not _has_letters(stem)


def find_private(folder: Path, sizes: Mapping[str, int], include: Sequence[str]) -> dict[str, str]:
    """The files of a folder that look private, unless the user named them in `include`.

    Args:
        sizes: path in the folder -> bytes.

    Returns:
        Path -> what it is.

    Raises:
        OSError: a file cannot be read.
    """
    private: dict[str, str] = {}
    for path, size in sizes.items():
        what = private_by_name(path) or private_by_first_bytes(folder / path, size)
        whole = is_known_by_whole_name(path)
        if what and not is_named(private_part(path), include, whole=whole):
            private[path] = what
    return private


def check_not_private(folder: Path, sizes: Mapping[str, int], include: Sequence[str]) -> None:
    """Checks that no file of a folder looks private, unless the user named it in `include`.

    Args:
        folder: the folder that the entry names.
        sizes: path in it -> bytes, of the files that the entry takes.

    Raises:
        PolicyError: names the private files.
    """
    private = find_private(folder, sizes, include)
    if not private:
        return
    shown = join_limited([f"{printable(path)} ({what})" for path, what in private.items()], _SHOWN)
    names = ", ".join(f'"{path}"' for path in list(private)[:_SHOWN])
    raise PolicyError(
        f"{folder} has private files, which should not travel by accident: {shown}.",
        f"Omit them: exclude: [{names}]. If they must be in the bundle, name them: include: "
        f'["*", {names}]   (every user who gets the bundle can read them)',
    )
