"""Compares a bundle with its lock: every byte accounted for. Findings are data, and all of them are found.

Three rooms do it: `tagfiles` (which of the files beside the payload can be believed), this one (what is there and
what should be there, by name, kind and size) and `readback` (the bytes). A damaged file is a `Finding`; being unable
to look (no such folder, not a bundle) is an exception. Never touches the network.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path

from stage import bundle as layout
from stage.bundle import require_bundle
from stage.digest import sha256_of_bytes
from stage.disk import read_file
from stage.findings import LEVELS, Finding, Found, Shard, VerificationReport
from stage.lockfile import Lockfile
from stage.names import printable
from stage.readback import PayloadFile, check_bytes, units
from stage.tagfiles import block_digests, check_implied_texts, check_tags, expected_payload, read_sound_lock

__all__ = ["LEVELS", "Finding", "VerificationReport", "verify"]


def verify(
    root: Path,
    level: str = "full",
    *,
    jobs: int | None = None,
    shard: Shard | None = None,
    progress: Callable[[int], None] | None = None,
) -> VerificationReport:
    """Verifies a bundle, or one shard of it.

    Args:
        level: `fast` looks at names, kinds and sizes; `full` also reads every byte.
        jobs: threads that read (default: one a core that this process may use).
        shard: read only this part of the bytes. Names, kinds, sizes and the files beside the payload are checked
            by every shard, so that `stage.shards.merge` can tell whether all saw the same bundle.
        progress: called with the number of payload bytes just read.

    Raises:
        UsageError: not a bundle, or a sound lock of a newer format.
    """
    require_bundle(root)
    found = Found()
    entries = _scan(root, found)
    tags, recorded = check_tags(root, entries, found)
    lock = read_sound_lock(root, tags, found)
    expected = expected_payload(lock, tags)
    if lock is not None:
        check_implied_texts(root, lock, tags, found)
    _check_names(entries, expected, lock, recorded, found)
    sound = _check_sizes(entries, expected, found)
    files = [PayloadFile(path, size, digest, block_digests(tags, digest, size)) for path, size, digest in sound]
    if level == "full":
        for finding in check_bytes(root, units(files, shard), jobs or _cores(), progress):
            found.add_finding(finding)
    return VerificationReport(
        root=root,
        level=level,
        bundle_id=lock.id if lock is not None else None,
        files=len(expected),
        size=sum(size or 0 for size, _ in expected.values()),
        findings=tuple(sorted(found.findings)),
        shard=shard,
        seal=_seal(root, entries),
    )


def _cores() -> int:
    """Cores this process may use: on a shared node that is fewer than there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _seal(root: Path, entries: Mapping[str, int]) -> str | None:
    """What tells one bundle as it lies here from another; None where no regular file (a pipe would not end) is."""
    if layout.TAG_MANIFEST not in entries:
        return None
    try:
        return sha256_of_bytes(read_file(root / layout.TAG_MANIFEST))
    except OSError:
        return None


def _scan(root: Path, found: Found) -> dict[str, int]:
    """Every regular file below `root`: relative path -> size. Links and special files are findings."""
    entries: dict[str, int] = {}
    folders = [""]
    while folders:
        folder = folders.pop()
        try:
            inside = sorted(os.scandir(root / folder), key=lambda e: e.name)
        except OSError as error:
            found.add(folder, "unreadable", "a folder that can be listed", error.strerror or "an error")
            continue
        for entry in inside:
            path = f"{folder}/{entry.name}" if folder else entry.name
            try:
                status = entry.stat(follow_symlinks=False)
            except OSError as error:  # gone since, or a path longer than the system takes
                found.add(path, "unreadable", "something that can be looked at", error.strerror or "an error")
                continue
            if stat.S_ISDIR(status.st_mode):
                folders.append(path)
            elif stat.S_ISREG(status.st_mode):
                entries[path] = status.st_size
            else:
                found.add(path, "unsafe", "a regular file", _kind(status.st_mode, root / path))
    return entries


def _kind(mode: int, path: Path) -> str:
    if stat.S_ISLNK(mode):
        return f"a symbolic link to {printable(str(path.readlink()))}"
    kinds = (
        (stat.S_ISFIFO, "a pipe"),
        (stat.S_ISSOCK, "a socket"),
        (stat.S_ISCHR, "a device"),
        (stat.S_ISBLK, "a device"),
    )
    return next((name for test, name in kinds if test(mode)), "something else")


def _check_names(
    entries: Mapping[str, int],
    expected: Mapping[str, object],
    lock: Lockfile | None,
    recorded: Mapping[str, str] | None,
    found: Found,
) -> None:
    """What is there and should not be, what should be there and is not."""
    blocks = {path for path in (entries if recorded is None else recorded) if path.startswith(f"{layout.BLOCKS}/")}
    tags = {*layout.TAG_FILES, layout.TAG_MANIFEST, layout.SIGNATURE}
    tags |= layout.tag_paths(lock) if lock is not None else blocks
    knows_payload = lock is not None or bool(expected)
    for path in entries:
        in_payload = path.startswith(f"{layout.PAYLOAD}/")
        if path not in (expected if in_payload else tags) and (knows_payload or not in_payload):
            found.add(path, "extra", "nothing of that name", "a file")
    # What the tag manifest names is required already; bundles of older releases have neither of the last two.
    required = {*expected, *(tags - {layout.SIGNATURE, layout.BOM, layout.VERIFIER})}
    for path in required:
        if path not in entries:
            found.add(path, "missing", "a file", "nothing")


def _check_sizes(
    entries: Mapping[str, int], expected: Mapping[str, tuple[int | None, str | None]], found: Found
) -> list[tuple[str, int, str]]:
    """Compares sizes; returns (path, size, sha256) of those files that are worth reading."""
    sound = []
    for path, (size, digest) in expected.items():
        if path not in entries:
            continue
        if size is not None and entries[path] != size:
            found.add(path, "mismatched", f"{size} bytes", f"{entries[path]} bytes")
        elif digest is not None:
            sound.append((path, entries[path], digest))
    return sound
