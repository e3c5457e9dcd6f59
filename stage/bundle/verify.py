"""Compares a bundle with its lock, byte for byte. All findings are collected, as data.

Three modules do it: `tag_files` (which of the files beside the payload can be believed), this one
(names, kinds and sizes) and `payload` (the bytes). A damaged file is a `Finding`; a bundle that
cannot be examined (no such folder, not a bundle) is an exception. Never uses the network.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Mapping, Set
from pathlib import Path
from typing import TYPE_CHECKING

from stage.bundle import bundle as layout
from stage.bundle.bundle import check_is_bundle
from stage.bundle.payload import PayloadFile, Readback, in_order, read_back
from stage.bundle.report import ASKED_FOR, BY_ID, FindingCollector, VerificationReport
from stage.bundle.resume import Resumed, VerifyCheckpoint
from stage.bundle.stamp import Stamp, now_ns, unsure_ns
from stage.bundle.tag_files import (
    Payload,
    check_lock,
    check_tags,
    expected_payload,
    read_sound_lock,
    unproven,
)
from stage.digests import sha256_of_bytes
from stage.errors import require_damage
from stage.files import read_file
from stage.paths import printable
from stage.processes import cores

if TYPE_CHECKING:
    from stage.lock.write import Lockfile

Entries = Set[str]
Progress = Callable[[int], None]


def verify(
    root: Path,
    level: str = "full",
    *,
    jobs: int | None = None,
    progress: Progress | None = None,
    journal: VerifyCheckpoint | None = None,
    bundle_id: str | None = None,
) -> VerificationReport:
    """Verifies a bundle.

    Args:
        level: `fast` looks at names, kinds and sizes; `full` also reads every byte.
        jobs: processes that read (default: one per core that this process may use).
        progress: called with the number of payload bytes just read.
        journal: where to resume, and to keep progress in case of an interruption.
        bundle_id: the id that the bundle must have, 64 hex digits. Another bundle is one finding,
            and its payload is not read.

    Raises:
        UsageError: not a bundle, or a sound lock of a newer format.
        IncompleteError: a process that read was ended from outside.
    """
    check_is_bundle(root)
    began, began_ns, found = time.time(), now_ns(), FindingCollector()
    entries = _scan(root, found)
    tags = check_tags(root, _sizes_beside(root, entries), found)
    seal = _seal(root, entries)
    lock = read_sound_lock(root, tags, found)
    if lock is not None:
        check_lock(lock, tags, found)
    expected = expected_payload(lock, tags)
    for large_text in (layout.LOCK, layout.MANIFEST):
        tags.pop(large_text, None)
    _check_names(entries, expected, lock, found)
    if level == "fast":  # else each file is read, and so its size is known
        _check_sizes(root, entries, expected, found)
    is_another = _is_another(lock, bundle_id, found)
    read, resumed = Readback(), Resumed()
    if level == "full" and not is_another:
        work = in_order(_files(root, entries, expected))
        read, resumed = _read(root, work, jobs or cores(), seal, journal, progress)
        found.add_all(read.findings)
    is_sound = level == "full" and not found.findings
    return VerificationReport(
        root=root,
        level=level,
        bundle_id=lock.id if lock is not None else None,
        files=len(expected),
        size=sum(size or 0 for size, _ in expected.values()),
        findings=tuple(sorted(found.findings)),
        seal=seal,
        began=resumed.since or began,
        stamp=_settled(root, read.stamp.plus(resumed.stamp), began_ns) if is_sound else None,
        proof=BY_ID if level == "full" and lock is not None else None,
        unproven=unproven(tags),
        has_unknown_verifier=_has_unknown_verifier(tags),
    )


def _settled(root: Path, stamp: Stamp, began_ns: int) -> Stamp | None:
    """The stamp, if all files were written before the verification began."""
    return stamp if stamp.is_older(began_ns, unsure_ns(root, stamp.newest)) else None


def _has_unknown_verifier(tags: Mapping[str, bytes]) -> bool:
    return layout.VERIFIER in tags and not layout.is_known_verifier(tags[layout.VERIFIER])


def _read(
    root: Path,
    work: list[PayloadFile],
    jobs: int,
    seal: str | None,
    journal: VerifyCheckpoint | None,
    progress: Progress | None,
) -> tuple[Readback, Resumed]:
    """Reads the bytes that an interrupted verification has not read already."""
    if journal is None or seal is None:
        return read_back(root, work, jobs, progress=progress), Resumed()
    resumed = journal.begin(seal, work)
    read = read_back(root, work, jobs, resumed.runs, progress=progress, keep=journal.add)
    journal.finished()
    return read, resumed


def _sizes_beside(root: Path, entries: Entries) -> dict[str, int]:
    """Path -> bytes of the files that are not payload."""
    payload = f"{layout.PAYLOAD}/"
    return {path: _size(root, path) for path in entries if not path.startswith(payload)}


def _size(root: Path, path: str) -> int:
    return os.lstat(f"{root}/{path}").st_size


def _is_another(lock: Lockfile | None, bundle_id: str | None, found: FindingCollector) -> bool:
    """Whether its lock is sound, and not the one that was asked for; also noted."""
    if (
        lock is None
        or bundle_id in (None, lock.id)
        or layout.LOCK in found
        or layout.TAG_MANIFEST in found
    ):
        return False
    found.add(layout.LOCK, "mismatched", f"{ASKED_FOR}{bundle_id}", f"{ASKED_FOR}{lock.id}")
    return True


def _seal(root: Path, entries: Entries) -> str | None:
    """sha256 of the tag manifest; None where it is no regular file (a pipe would not end)."""
    if layout.TAG_MANIFEST not in entries:
        return None
    try:
        return sha256_of_bytes(read_file(root / layout.TAG_MANIFEST))
    except OSError:
        return None


def _scan(root: Path, found: FindingCollector) -> Entries:
    """The paths of all regular files below `root`. Links and special files are findings.

    No file is opened or asked for its `stat`, which is slow on a network disk.
    """
    entries: set[str] = set()
    folders = [""]
    while folders:
        folder = folders.pop()
        try:
            with os.scandir(root / folder) as listing:
                inside = list(listing)
        except OSError as error:
            require_damage(error)
            if not folder:  # nothing can be said of this bundle
                raise
            found.add(
                folder, "unreadable", "a folder that can be listed", error.strerror or "an error"
            )
            continue
        before = f"{folder}/" if folder else ""
        for entry in inside:
            path = before + entry.name
            try:
                if entry.is_file(follow_symlinks=False):
                    entries.add(path)
                elif entry.is_dir(follow_symlinks=False):
                    folders.append(path)
                else:
                    mode = entry.stat(follow_symlinks=False).st_mode
                    found.add(path, "unsafe", "a regular file", _kind(mode, root / path))
            except OSError as error:  # gone since
                require_damage(error)
                found.add(
                    path,
                    "unreadable",
                    "something that can be looked at",
                    error.strerror or "an error",
                )
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
    there: Entries,
    expected: Mapping[str, object],
    lock: Lockfile | None,
    found: FindingCollector,
) -> None:
    """Finds extra and missing files."""
    beside = {path for path in there if not path.startswith(f"{layout.PAYLOAD}/")}
    tags = {*layout.TAG_FILES, *layout.SEAL}
    knows_payload = lock is not None or bool(expected)
    for path in (beside - tags) | (there - beside - expected.keys() if knows_payload else set()):
        found.add(path, "extra", "nothing of that name", "a file")
    # Files that the tag manifest names are checked already; bundles of older releases have no
    # verifier.
    required = {*expected, *(tags - {layout.SIGNATURE, layout.VERIFIER})}
    for path in required - there:
        if (above := found.folder_above(path)) is None:
            found.add(path, "missing", "a file", "nothing")
        else:
            found.add(path, "unreadable", "a file", above.found)


def _check_sizes(root: Path, entries: Entries, expected: Payload, found: FindingCollector) -> None:
    for path, (size, _) in expected.items():
        try:
            if size is not None and path in entries and (there := _size(root, path)) != size:
                found.add(path, "mismatched", f"{size} bytes", f"{there} bytes")
        except OSError as error:  # a folder that may be listed and not entered
            require_damage(error)
            found.add(path, "unreadable", f"{size} bytes", error.strerror or "an error")


def _files(root: Path, entries: Entries, expected: Payload) -> list[PayloadFile]:
    """The files that exist and have a digest."""
    files = []
    for path, (size, digest) in expected.items():
        if digest is not None and path in entries:
            size = _size(root, path) if size is None else size
            files.append(PayloadFile(path, size, digest))
    return files
