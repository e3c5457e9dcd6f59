"""What was moved and not damaged: a missing file whose bytes lie in the bundle under a name that is not of it.

And which folders are extra as a whole, so that somebody's 300 files beside the payload are one line to read.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from stage.digest import hash_file


def find_renamed(
    root: Path, missing: Mapping[str, tuple[int, str]], extra: Mapping[str, int]
) -> tuple[tuple[str, str], ...]:
    """Pairs a missing file with an extra one that has its bytes; reads only extra files of a size that is missed.

    Args:
        missing: path -> size and sha256, as the lock has them. Of files without a byte nothing can be told.
        extra: path -> size.

    Returns:
        (path it should have, path it has), sorted; no path twice.
    """
    wanted = {size for size, _ in missing.values() if size}
    by_digest: dict[str, list[str]] = {}
    for path, size in sorted(extra.items(), reverse=True):
        if size in wanted:
            try:
                by_digest.setdefault(hash_file(root / path).sha256, []).append(path)
            except OSError:  # it can be no more than extra, then
                continue
    return tuple(
        (path, by_digest[digest].pop()) for path, (_, digest) in sorted(missing.items()) if by_digest.get(digest)
    )


def moves(root: Path, renamed: Iterable[tuple[str, str]]) -> dict[tuple[str, str], list[str]]:
    """The fewest moves that give files their names again: (to, from) -> the files that this is for, by the right name.

    A folder that got another name is one, where nothing stands in its old place.
    """
    found: dict[tuple[str, str], list[str]] = {}
    for old, new in renamed:
        right, wrong = old.split("/"), new.split("/")
        while len(right) > 1 and len(wrong) > 1 and right[-1] == wrong[-1]:
            right, wrong = right[:-1], wrong[:-1]
        whole = ("/".join(right), "/".join(wrong))
        pair = (old, new) if os.path.lexists(root / whole[0]) else whole
        found.setdefault(pair, []).append(old)
    return found


def whole_folders(root: Path, extra: Iterable[str]) -> dict[str, str]:
    """Extra file -> the topmost folder around it in which nothing is but extra files; files without one are not in it.

    Looks at the disk, and no further than the first file that is of the bundle.
    """
    extra, known = set(extra), dict[str, bool]()

    def is_whole(folder: str) -> bool:
        if folder not in known:
            try:
                with os.scandir(root / folder) as listing:
                    entries = [(f"{folder}/{entry.name}", entry.is_dir(follow_symlinks=False)) for entry in listing]
            except OSError:  # gone, or not ours to read: its files are told one by one
                entries = [(folder, False)]
            files_first = sorted(entries, key=lambda entry: entry[1])
            known[folder] = all(is_whole(path) if is_folder else path in extra for path, is_folder in files_first)
        return known[folder]

    found = {}
    for path in extra:
        parts = path.split("/")[:-1]
        folders = ("/".join(parts[: depth + 1]) for depth in range(len(parts)))
        if (folder := next(filter(is_whole, folders), None)) is not None:
            found[path] = folder
    return found
