"""What lies beside data by habit and must not travel by accident: private keys, passwords, tokens.

Judged by names that programs give such files, and by the first bytes of small ones. Not a search for secrets inside
data: what is caught is the `path: .` that takes a `.env` along, and a bundle is copied to many people's disks.
"""

from __future__ import annotations

import re
from pathlib import Path

LARGEST = 64 * 2**10  # bytes: a key, however long its chain of certificates, is smaller
_HEAD = 512  # bytes: where a key begins that has a comment in front
_NAMES = {
    **dict.fromkeys(
        ("id_rsa", "id_dsa", "id_ecdsa", "id_ed25519", "id_ecdsa_sk", "id_ed25519_sk"), "a private key of ssh"
    ),
    **dict.fromkeys((".netrc", "_netrc", ".pgpass", ".pypirc", ".git-credentials", ".htpasswd"), "passwords"),
    **dict.fromkeys(("kaggle.json", "stored_tokens"), "a token"),
}
_SUFFIXES = {".p12": "a key store", ".pfx": "a key store", ".kdbx": "passwords", ".ppk": "a private key of PuTTY"}
_FOLDERS = {
    ".ssh": "keys and hosts of ssh",
    ".gnupg": "keys of GnuPG",
    ".aws": "credentials of AWS",
    ".kube": "credentials of Kubernetes",
}
_TEMPLATES = (".example", ".sample", ".template", ".dist", ".defaults")
_KEY_SUFFIXES = (".pem", ".key", ".crt", ".cer", ".pub", "")
_KEY = re.compile(rb"^(-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----|PuTTY-User-Key-File-\d)", re.MULTILINE)
_TOKEN = re.compile(rb"(hf_|gh[oprsu]_|github_pat_|glpat-)[A-Za-z0-9_-]{20,}\s*")


def telling_part(path: str) -> str:
    """The folder or file in a path that a person has to name for it to travel: `.ssh` of `a/.ssh/config`."""
    *folders, name = path.split("/")
    return next((folder for folder in folders if folder.lower() in _FOLDERS), name)


def is_known_by_whole_name(path: str) -> bool:
    """Whether it is all of a name that tells (`kaggle.json`, `.env`, the folder `.ssh`), not how it ends."""
    return by_name(path) is not None and not path.lower().endswith(tuple(_SUFFIXES))


def by_name(path: str) -> str | None:
    """What the name says is in a file; None if it says nothing.

    Args:
        path: relative to the folder that is taken, POSIX.
    """
    *folders, name = path.lower().split("/")
    for folder in folders:
        if folder in _FOLDERS:
            return _FOLDERS[folder]
    if name in _NAMES:
        return _NAMES[name]
    if name == ".env" or (name.startswith(".env.") and not name.endswith(_TEMPLATES)):
        return "settings, often with passwords and tokens"
    return next((what for suffix, what in _SUFFIXES.items() if name.endswith(suffix)), None)


def by_first_bytes(file: Path, size: int) -> str | None:
    """What the beginning of a small file says it is; None if it says nothing.

    Raises:
        OSError: it cannot be read.
    """
    if not 0 < size <= LARGEST:
        return None
    with open(file, "rb", buffering=0) as opened:
        data = opened.read(LARGEST if file.suffix.lower() in _KEY_SUFFIXES else _HEAD)
    if _KEY.search(data):
        return "a private key"
    return "a token" if size <= _HEAD and _TOKEN.fullmatch(data) else None
