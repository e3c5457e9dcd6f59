"""Reads a payload back and compares it with its digests, with every core, in pieces that any machine can share out.

The unit of work is a 16 MiB block of a large file or a whole small one. The digests of a large file's blocks lie in
`blocks/<sha256>`, which the tag manifest vouches for exactly as it vouches for the lock: a file of the right size whose
every block matches is the file, unless someone found two texts with one sha256. So one 4 GiB file keeps all cores
busy, and a bad byte is known to its block. (docs/adr/0015 tells what an id without a signature is worth.)

Threads, not processes: hashing and reading release the GIL. Small files go in batches, since handing over each one
costs more than hashing it. Largest first, so that no thread ends up alone with much to read.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from stage.digest import BLOCK_SIZE
from stage.findings import Finding, Shard, in_ranges

BUFFER_SIZE = 2**20  # all the memory a worker takes; larger ones were no faster
BATCH_BYTES = BLOCK_SIZE
BATCH_FILES = 500
COST_OF_OPENING = 2**16  # bytes that could be read meanwhile: keeps shards of many small files even

Progress = Callable[[int], None]


@dataclass(frozen=True)
class PayloadFile:
    """A file to read back: path in the bundle, size in bytes, sha256, and its blocks' sha256 where known."""

    path: str
    size: int
    sha256: str
    blocks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Unit:
    """Bytes `start` to `end` of a file, and the sha256 they should have; the whole file unless it has blocks."""

    file: PayloadFile
    start: int
    end: int
    sha256: str


@dataclass(frozen=True)
class _Bad:
    """A unit that is not as it should be: its digest (None if it was not to be had), its length, or why not read."""

    unit: Unit
    sha256: str | None
    size: int
    why: str


def units(files: Iterable[PayloadFile], shard: Shard | None = None) -> list[Unit]:
    """What there is to read, the largest file first; of that, one shard's part.

    The parts are contiguous (a disk likes that), disjoint, together everything, and equal for equal `files`.
    """
    ordered = [unit for file in sorted(files, key=lambda file: (-file.size, file.path)) for unit in _units_of(file)]
    if shard is None:
        return ordered
    costs = [unit.end - unit.start + COST_OF_OPENING for unit in ordered]
    total, before, mine = sum(costs), 0, []
    for unit, cost in zip(ordered, costs, strict=True):
        if before * shard.count // total == shard.number - 1:
            mine.append(unit)
        before += cost
    return mine


def _units_of(file: PayloadFile) -> Iterator[Unit]:
    if not file.blocks:
        yield Unit(file, 0, file.size, file.sha256)
    for number, digest in enumerate(file.blocks):
        start = number * BLOCK_SIZE
        yield Unit(file, start, min(start + BLOCK_SIZE, file.size), digest)


def check_bytes(root: Path, work: Sequence[Unit], jobs: int, progress: Progress | None = None) -> list[Finding]:
    """Reads every unit with `jobs` threads; one finding for each file that is not as it should be.

    Args:
        progress: called, from any thread, with the number of bytes just read.
    """
    reader = _Reader(root, progress)
    pool = ThreadPoolExecutor(max_workers=jobs)
    try:
        bad = [one for batch in pool.map(reader.check, _batches(work, jobs)) for one in batch]
    finally:
        pool.shutdown(wait=True, cancel_futures=True)  # after Ctrl-C, not everything that is still queued
    return _as_findings(bad)


def _batches(work: Sequence[Unit], jobs: int) -> Iterator[list[Unit]]:
    most = max(1, min(BATCH_FILES, len(work) // (4 * jobs)))
    batch: list[Unit] = []
    size = 0
    for unit in work:
        batch.append(unit)
        size += unit.end - unit.start
        if size >= BATCH_BYTES or len(batch) >= most:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class _Reader:
    """Reads units; each thread has one buffer for all of them."""

    def __init__(self, root: Path, progress: Progress | None) -> None:
        self._root = f"{root}/"
        self._progress = progress
        self._buffers = threading.local()

    def check(self, batch: list[Unit]) -> list[_Bad]:
        bad: list[_Bad] = []
        read = 0
        for unit in batch:
            try:
                digest, size = self._hash(unit)
            except OSError as error:
                bad.append(_Bad(unit, None, 0, error.strerror or "an error"))
                continue
            read += size
            if digest != unit.sha256 or size != unit.end - unit.start:
                bad.append(_Bad(unit, digest, size, ""))
        if self._progress:
            self._progress(read)
        return bad

    def _hash(self, unit: Unit) -> tuple[str, int]:
        """sha256 and length of what lies there; of a whole file, all of it, should it have grown."""
        try:
            buffer = self._buffers.buffer
        except AttributeError:
            buffer = self._buffers.buffer = memoryview(bytearray(BUFFER_SIZE))
        want = unit.end - unit.start if unit.file.blocks else None
        digest, size = sha256(), 0
        with open(os.open(self._root + unit.file.path, os.O_RDONLY | os.O_NOFOLLOW), "rb", buffering=0) as source:
            if unit.start:
                source.seek(unit.start)
            while want is None or size < want:
                count = source.readinto(buffer if want is None else buffer[: want - size])
                if not count:
                    break
                digest.update(buffer[:count])
                size += count
        return digest.hexdigest(), size


def _as_findings(bad: Iterable[_Bad]) -> list[Finding]:
    by_path: dict[str, list[_Bad]] = {}
    for one in bad:
        by_path.setdefault(one.unit.file.path, []).append(one)
    return [_finding(several) for several in by_path.values()]


def _finding(bad: list[_Bad]) -> Finding:
    first, file = bad[0], bad[0].unit.file
    if file.blocks:
        return in_ranges(file.path, file.sha256, [(one.unit.start, one.unit.end, one.why) for one in bad])
    if first.why:
        return Finding(file.path, "unreadable", f"sha256 {file.sha256}", first.why)
    if first.size != file.size:
        return Finding(file.path, "mismatched", f"{file.size} bytes", f"{first.size} bytes when read")
    return Finding(file.path, "mismatched", f"sha256 {file.sha256}", f"sha256 {first.sha256}")
