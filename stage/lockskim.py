"""Reads the file lists out of a lock in its one true text at one glance, and leaves the rest to a reader of JSON.

Of 100,000 entries nearly all have one shape, to the byte (`lockfile` writes them so). One regular expression takes
their fields; JSON, a check of each field and writing it all again to compare take five times as long. Nothing here is
believed: what is not that shape is left to the ordinary way, and `lockreader` checks the rest.
"""

from __future__ import annotations

import re
from typing import NamedTuple

# Text between quotes that JSON reads as it stands, and that is written so again. No line ends in it.
_PLAIN = r'[^"\\\x00-\x1f]*'
_ENTRY = re.compile(
    r"\n    \{"
    rf'(?:\n     "made_by": "({_PLAIN})",)?'
    rf'\n     "origin": "({_PLAIN})",'
    rf'\n     "path": "({_PLAIN})",'
    r'\n     "sha256": "([0-9a-f]{64})",'
    r'\n     "size": (0|[1-9][0-9]{0,17})'
    r'(?:,\n     "upstream": \{\n      "(git-sha1(?=": "[0-9a-f]{40}")|(?:lfs-)?sha256(?=": "[0-9a-f]{64}"))'
    r'": "([0-9a-f]*)"\n     \})?'
    r"\n    \}(?:,|\Z)"
)
_STRIDE = _ENTRY.groups + 1
_BEGIN, _END = '\n   "files": [', "\n   ]"
NO_LIST = '\n   "files": null'


class FileList(NamedTuple):
    """The files of one asset, as columns, in the order of their paths; None where an entry lacks the field."""

    made_by: list[str | None]
    origins: list[str]
    paths: list[str]
    sha256: list[str]
    sizes: list[int]
    algorithms: list[str | None]
    digests: list[str | None]


class Skimmed(NamedTuple):
    """A lock without its file lists, `null` in place of each, and those lists in the order they stood in."""

    rest: bytes
    lists: list[FileList]


def skim(data: bytes) -> Skimmed | None:
    """The file lists of a lock's text; None if they are not, to the byte, what `lockfile` would write.

    A raw line end never stands inside a text of JSON, so what begins a line here begins one for every reader.
    """
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return None
    rest, lists, done = [], [], 0
    while (begin := text.find(_BEGIN, done)) >= 0:
        rest.append(text[done:begin])
        begin += len(_BEGIN)
        end = begin if text.startswith("]", begin) else text.find(_END, begin)
        files = _file_list(text[begin:end]) if end >= 0 else None
        if files is None:
            return None
        lists.append(files)
        done = end + len(_END if end > begin else "]")
    rest.append(text[done:])
    return Skimmed(NO_LIST.join(rest).encode(), lists)


def _file_list(text: str) -> FileList | None:
    parts = _ENTRY.split(text)  # what lies between entries, and the groups of each, in turn
    if any(parts[::_STRIDE]) or text.endswith(","):
        return None
    made_by, origins, paths, sha256, sizes, algorithms, digests = (parts[group::_STRIDE] for group in range(1, _STRIDE))
    if not paths:  # one that is empty is written without a line end
        return None if text else FileList([], [], [], [], [], [], [])
    if paths != sorted(paths):
        return None
    return FileList(made_by, origins, paths, sha256, list(map(int, sizes)), algorithms, digests)
