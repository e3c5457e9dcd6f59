"""Recognizes private keys, passwords and tokens that are often stored beside data.

They are recognized by the names that programs give to such files, and by the first bytes of small
files. This is no search for secrets inside data. It catches the `path: .` that takes a `.env` file
into a bundle, which many users may copy.
"""

from __future__ import annotations

import re
from pathlib import Path

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
    return by_name(path) is not None and not path.lower().endswith(tuple(_SUFFIXES))


def by_name(path: str) -> str | None:
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


def by_first_bytes(file: Path, size: int) -> str | None:
    """The private content that the first bytes of a small file show; None if they show none.

    Args:
        size: of the file, in bytes.

    Raises:
        OSError: it cannot be read.
    """
    if not 0 < size <= MAX_SIZE:
        return None
    with open(file, "rb", buffering=0) as opened:
        most = MAX_SIZE if file.suffix.lower() in _KEY_SUFFIXES else _HEAD
        data = opened.read(min(most, size + 1))
    if _KEY.search(data):
        return "a private key"
    return "a token" if size <= _HEAD and _TOKEN.fullmatch(data) else None
