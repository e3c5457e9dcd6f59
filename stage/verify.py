"""Compares a bundle with its lock: every byte accounted for. Findings are data, and all of them are found.

Four rooms do it: `tagfiles` (which of the files beside the payload can be believed), this one (what is there and
what should be there, by name, kind and size), `headstart` and `readback` (the bytes, in the background). A damaged file
is a `Finding`; being unable to look (no such folder, not a bundle) is an exception. Never touches the network.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from stage import bundle as layout
from stage.bundle import require_bundle
from stage.digest import BLOCKS_ABOVE, sha256_of_bytes
from stage.disk import read_file
from stage.findings import LEVELS, Finding, Found, Shard, VerificationReport
from stage.headstart import HeadStart, Sound
from stage.journal import Journal, Resumed
from stage.names import printable
from stage.readback import PayloadFile, Readback, Reading, Unit, units
from stage.stamp import Stamp, now_ns, unsure_ns
from stage.tagfiles import (
    Payload,
    block_digests,
    check_implied_texts,
    check_lock_text,
    check_tags,
    claimed_payload,
    expected_payload,
    read_sound_lock,
)
from stage.workers import cores

if TYPE_CHECKING:
    from stage.lockfile import Lockfile

__all__ = ["LEVELS", "Finding", "VerificationReport", "verify"]

Entries = Mapping[str, os.DirEntry[str]]


def verify(
    root: Path,
    level: str = "full",
    *,
    jobs: int | None = None,
    shard: Shard | None = None,
    progress: Callable[[int], None] | None = None,
    journal: Journal | None = None,
    ahead: HeadStart | None = None,
) -> VerificationReport:
    """Verifies a bundle, or one shard of it.

    Args:
        level: `fast` looks at names, kinds and sizes; `full` also reads every byte.
        jobs: processes that read (default: one a core that this process may use).
        shard: read only this part of the bytes. Names, kinds, sizes and the files beside the payload are checked
            by every shard, so that `stage.shards.merge` can tell whether all saw the same bundle.
        progress: called with the number of payload bytes just read.
        journal: where to go on, and to note what should be known if this is interrupted.
        ahead: reads already; only for a whole verification of every byte.

    Raises:
        UsageError: not a bundle, or a sound lock of a newer format.
        IncompleteError: a process that read was ended from outside.
    """
    require_bundle(root)
    began, began_ns = (ahead.began, ahead.began_ns) if ahead else (time.time(), now_ns())
    jobs = jobs or cores()
    found = Found()
    entries = _scan(root, found)
    payload = f"{layout.PAYLOAD}/"
    beside = {p: e.stat(follow_symlinks=False).st_size for p, e in entries.items() if not p.startswith(payload)}
    tags, recorded = check_tags(root, beside, found)
    seal = _seal(root, entries)

    def to_read(files: Payload) -> list[Unit]:
        return units(_files(entries, files, tags), shard) if level == "full" else []

    # Reading begins with what the lock claims; whether it may be believed is found out meanwhile.
    known, claimed = claimed_payload(tags)
    later = ahead.leaves(claimed) if ahead else claimed
    work = to_read(later)
    resumed = journal.begin(seal, work) if journal and seal else Resumed()
    if ahead and work:
        ahead.wait(progress)  # its processes and these together would be more than `jobs`
    with Reading(root, work, jobs, resumed.runs) as reading:
        lock = read_sound_lock(root, tags, known, found)
        expected = expected_payload(lock, tags)
        implied = layout.payload_manifest(lock) if lock is not None and lock.is_complete else None
        if lock is not None:
            check_lock_text(lock, tags, found)
            check_implied_texts(root, lock, implied, tags, found)
        _check_names(entries, set(beside), expected, lock, recorded, found)
        if level == "fast" or shard is not None:  # whoever reads a file sees its size; here not all are read
            _check_sizes(entries, expected, found)
        if expected == claimed:
            readback = reading.finish(progress, journal.add if journal else None)
            if ahead:
                ahead.wait(progress)
            sound = ahead.sound(implied, lock.files) if ahead and lock is not None else Sound()
            missed = {path: claimed[path] for path in sound.astray - later.keys()}
    if expected != claimed:
        readback, resumed, sound, missed = Readback([], Stamp()), Resumed(), Sound(), expected
    if missed:
        with Reading(root, to_read(missed), jobs) as reading:
            readback = readback.plus(reading.finish(progress))
    if journal:
        journal.finished()
    for finding in readback.findings:
        found.add_finding(finding)
    stamp = readback.stamp.plus(resumed.stamp).plus(sound.stamp)
    reads_all = level == "full" and shard is None
    return VerificationReport(
        root=root,
        level=level,
        bundle_id=lock.id if lock is not None else None,
        files=len(expected),
        size=sum(size or 0 for size, _ in expected.values()),
        findings=tuple(sorted(found.findings)),
        shard=shard,
        seal=seal,
        began=resumed.since or began,
        stamp=_stamp(stamp, root, began_ns) if level == "full" and not found.findings else None,
        renamed=_renamed(root, entries, expected, found.findings) if reads_all else (),
    )


def _stamp(stamp: Stamp, root: Path, began_ns: int) -> Stamp | None:
    return stamp if stamp.settled(began_ns, unsure_ns(root, stamp.newest)) else None


def _renamed(
    root: Path, entries: Entries, expected: Payload, findings: Iterable[Finding]
) -> tuple[tuple[str, str], ...]:
    paths = {problem: {f.path for f in findings if f.problem == problem} for problem in ("missing", "extra")}
    missing = {
        path: (size, digest)
        for path in paths["missing"]
        if path in expected and (size := expected[path][0]) and (digest := expected[path][1])
    }
    if not missing:
        return ()
    from stage.renames import find_renamed  # whoever finds nothing missing does not wait for it

    return find_renamed(root, missing, {p: entries[p].stat(follow_symlinks=False).st_size for p in paths["extra"]})


def _seal(root: Path, entries: Entries) -> str | None:
    """What tells one bundle as it lies here from another; None where no regular file (a pipe would not end) is."""
    if layout.TAG_MANIFEST not in entries:
        return None
    try:
        return sha256_of_bytes(read_file(root / layout.TAG_MANIFEST))
    except OSError:
        return None


def _scan(root: Path, found: Found) -> Entries:
    """Every regular file below `root`, by relative path. Links and special files are findings."""
    entries: dict[str, os.DirEntry[str]] = {}
    folders = [""]
    while folders:
        folder = folders.pop()
        try:
            with os.scandir(root / folder) as listing:
                inside = list(listing)
        except OSError as error:
            found.add(folder, "unreadable", "a folder that can be listed", error.strerror or "an error")
            continue
        before = f"{folder}/" if folder else ""
        for entry in inside:
            path = before + entry.name
            try:
                if entry.is_file(follow_symlinks=False):
                    entries[path] = entry
                elif entry.is_dir(follow_symlinks=False):
                    folders.append(path)
                else:
                    mode = entry.stat(follow_symlinks=False).st_mode
                    found.add(path, "unsafe", "a regular file", _kind(mode, root / path))
            except OSError as error:  # gone since
                found.add(path, "unreadable", "something that can be looked at", error.strerror or "an error")
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
    entries: Iterable[str],
    beside: set[str],
    expected: Mapping[str, object],
    lock: Lockfile | None,
    recorded: Mapping[str, str] | None,
    found: Found,
) -> None:
    """What is there and should not be, what should be there and is not."""
    there = set(entries)
    blocks = {path for path in (there if recorded is None else recorded) if path.startswith(f"{layout.BLOCKS}/")}
    tags = {*layout.TAG_FILES, *layout.SEAL}
    tags |= layout.tag_paths(lock) if lock is not None else blocks
    knows_payload = lock is not None or bool(expected)
    for path in (beside - tags) | (there - beside - expected.keys() if knows_payload else set()):
        found.add(path, "extra", "nothing of that name", "a file")
    # What the tag manifest names is required already; bundles of older releases have neither of the last two.
    required = {*expected, *(tags - {layout.SIGNATURE, layout.BOM, layout.VERIFIER})}
    for path in required - there:
        found.add(path, "missing", "a file", "nothing")


def _check_sizes(entries: Entries, expected: Payload, found: Found) -> None:
    for path, (size, _) in expected.items():
        if size is not None and (entry := entries.get(path)) is not None:
            there = entry.stat(follow_symlinks=False).st_size
            if there != size:
                found.add(path, "mismatched", f"{size} bytes", f"{there} bytes")


def _files(entries: Entries, expected: Payload, tags: Mapping[str, bytes]) -> list[PayloadFile]:
    """Those files that are there and can be compared with something."""
    files = []
    for path, (size, digest) in expected.items():
        if digest is not None and (entry := entries.get(path)) is not None:
            size = entry.stat(follow_symlinks=False).st_size if size is None else size
            blocks = block_digests(tags, digest, size) if size > BLOCKS_ABOVE else ()
            files.append(PayloadFile(path, size, digest, blocks))
    return files
