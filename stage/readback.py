"""Reads a payload back and compares it with its digests, with every core, in pieces that any machine can share out.

The unit of work is a 16 MiB block of a large file or a whole small one. The digests of a large file's blocks lie in
`blocks/<sha256>`, which the tag manifest vouches for exactly as it vouches for the lock: a file of the right size whose
every block matches is the file, unless someone found two texts with one sha256. So one 4 GiB file keeps all cores
busy, and a bad byte is known to its block. (docs/adr/0015 tells what an id without a signature is worth.)

Units go to processes (`workers`) in batches that get smaller towards the end, the largest files first, so that none
ends up alone with much to read; the caller checks names meanwhile. The smallest files come last, many to a batch.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import sha256
from itertools import accumulate
from mmap import ACCESS_COPY, mmap
from operator import attrgetter
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from stage.digest import BLOCK_SIZE
from stage.findings import Finding, Shard, in_ranges
from stage.stamp import Stamp, stamp_of
from stage.workers import MOST_PIECES, Send, Workers

# All the memory a worker needs; larger ones were no faster. It begins a page: into a `bytearray`, which begins 16 bytes
# off, the kernel copies at two thirds of the speed (AMD EPYC).
BUFFER_SIZE = 2**20
COST_OF_OPENING = 2**16  # bytes that could be read meanwhile: keeps shards of many small files even
SMALL = 2**18  # bytes of a file that is read in one go
LEAST_BATCH = 2**23  # milliseconds of work
LARGEST_BATCH = 2**30
TELL_EVERY = 2**25  # bytes between two words of progress

Progress = Callable[[int], None]


class PayloadFile(NamedTuple):
    """A file to read back: path in the bundle, size in bytes, sha256, and its blocks' sha256 where known."""

    path: str
    size: int
    sha256: str
    blocks: tuple[str, ...] = ()


class Unit(NamedTuple):
    """Bytes `start` to `end` of a file, and the sha256 they should have; the whole file unless it has blocks."""

    file: PayloadFile
    start: int
    end: int
    sha256: str


class Batch(NamedTuple):
    """Units that were read in one go and found sound, and what tells that their files were not touched since.

    Attributes:
        places: of the units in the list of all.
        stamp: of the files that begin in this batch, each once.
        others: of the files of units that do not begin their file, one for each unit.
    """

    places: range
    stamp: Stamp
    others: Stamp


class Readback(NamedTuple):
    """What came of reading: one finding for each file that is not as it should be; the stamp of those that are."""

    findings: list[Finding]
    stamp: Stamp

    def plus(self, other: Readback) -> Readback:
        """What came of both, of different files."""
        return Readback(self.findings + other.findings, self.stamp.plus(other.stamp))


class _Bad(NamedTuple):
    """A unit that is not as it should be: its digest (None if it was not to be had), its length, or why not read."""

    unit: Unit
    sha256: str | None
    size: int
    why: str


def units(files: Iterable[PayloadFile], shard: Shard | None = None) -> list[Unit]:
    """What there is to read, the largest file first; of that, one shard's part.

    The parts are contiguous (a disk likes that), disjoint, together everything, and equal for equal `files`.
    """
    ordered: list[Unit] = []
    for file in sorted(sorted(files), key=attrgetter("size"), reverse=True):
        if file.blocks:
            starts = range(0, file.size, BLOCK_SIZE)
            ordered += [
                Unit(file, start, min(start + BLOCK_SIZE, file.size), digest)
                for start, digest in zip(starts, file.blocks, strict=True)
            ]
        else:
            ordered.append(Unit(file, 0, file.size, file.sha256))
    if shard is None:
        return ordered
    costs = [unit.end - unit.start + COST_OF_OPENING for unit in ordered]
    total, before, mine = sum(costs), 0, []
    for unit, cost in zip(ordered, costs, strict=True):
        if before * shard.count // total == shard.number - 1:
            mine.append(unit)
        before += cost
    return mine


def batches(work: Sequence[Unit], jobs: int, skip: Sequence[range] = ()) -> list[range]:
    """Shares work out: parts of a part of what is left, so that all end together; at most `MOST_PIECES`.

    Args:
        skip: runs of places that need no reading. No batch reaches over one.
    """
    costs = [unit.end - unit.start + COST_OF_OPENING for unit in work]
    for run in skip:
        costs[run.start : run.stop] = [0] * len(run)
    before = [0, *accumulate(costs)]  # the cost of all that comes before a place
    least = max(LEAST_BATCH, before[-1] // (MOST_PIECES // 2))
    largest = max(LARGEST_BATCH, least)
    result: list[range] = []
    for run in _gaps(skip, len(work)):
        first = run.start
        while first < run.stop:
            cost = min(max((before[-1] - before[first]) // (2 * jobs), least), largest)
            stop = min(bisect_left(before, before[first] + cost, first + 1), run.stop)
            result.append(range(first, stop))
            first = stop
    return result


def _gaps(runs: Iterable[range], end: int) -> Iterator[range]:
    """What lies between runs of places, from 0 to `end`."""
    start = 0
    for run in sorted(runs, key=attrgetter("start")):
        yield range(start, run.start)
        start = run.stop
    yield range(start, end)


class Reading:
    """Reads in the background; `finish` waits for it. A context manager: leaving it ends the reading.

    Args:
        skip: runs of places in `work` that need no reading.
    """

    def __init__(self, root: Path, work: Sequence[Unit], jobs: int, skip: Sequence[range] = ()) -> None:
        self._work = work
        self._batches = batches(work, jobs, skip)
        self._root = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
        self._workers = Workers(self._read, len(self._batches), jobs)
        self._buffer = memoryview(b"")

    def __enter__(self) -> Reading:
        self._workers.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._workers.__exit__(kind, value, trace)
        os.close(self._root)

    def finish(self, progress: Progress | None = None, keep: Callable[[Batch], None] | None = None) -> Readback:
        """Waits until all is read.

        Args:
            progress: called with the number of bytes just read.
            keep: called with each batch that is sound, as soon as that is known.

        Raises:
            IncompleteError: a process was ended from outside.
        """
        bad, stamp = [], Stamp()
        for kind, *rest in self._workers.messages():
            if kind == _READ and progress:
                progress(*rest)
            elif kind == _BAD:
                place, digest, size, why = rest
                bad.append(_Bad(self._work[place], digest, size, os.strerror(why) if why else ""))
            elif kind == _SOUND:
                number, sums, others = rest
                batch = Batch(self._batches[number], Stamp(*sums), Stamp(*others))
                stamp = stamp.plus(batch.stamp)
                if keep:
                    keep(batch)
        return Readback(_as_findings(bad), stamp)

    def _read(self, number: int, send: Send) -> None:
        """Reads one batch, in whichever process."""
        places = self._batches[number]
        others: list[os.stat_result] = []
        stamp = stamp_of(self._sound(places, others, send))
        if stamp.files + len(others) == len(places):
            send([_SOUND, number, stamp, stamp_of(others)])

    def _sound(self, places: range, others: list[os.stat_result], send: Send) -> Iterator[os.stat_result]:
        """Reads these units; of each that is sound, yields its file's status if the unit begins the file."""
        read = 0
        for place in places:
            file, start, end, expected = self._work[place]
            digest, size = None, 0
            try:
                source = os.open(file.path, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=self._root)
                try:
                    status = os.fstat(source)
                    if status.st_size == file.size:
                        digest, size = self._hash(source, start, end, file)
                finally:
                    os.close(source)
            except OSError as error:
                send([_BAD, place, None, 0, error.errno])
                continue
            read += size
            if read >= TELL_EVERY:
                send([_READ, read])
                read = 0
            if digest != expected:
                send([_BAD, place, digest, size if digest else status.st_size, 0])
            elif start:
                others.append(status)
            else:
                yield status
        send([_READ, read])

    def _hash(self, source: int, start: int, end: int, file: PayloadFile) -> tuple[str, int]:
        """sha256 and length of what lies there; of a whole file, all of it, should it have grown."""
        if end <= SMALL:
            data = os.read(source, end + 1)
            if len(data) == end:
                return sha256(data).hexdigest(), end
            os.lseek(source, 0, os.SEEK_SET)  # it changed, or came in parts: slowly, then
        if not self._buffer:
            self._buffer = memoryview(mmap(-1, BUFFER_SIZE, access=ACCESS_COPY))
        want = end - start if file.blocks else None
        digest, size = sha256(), 0
        if start:
            os.lseek(source, start, os.SEEK_SET)
        while want is None or size < want:
            count = os.readv(source, [self._buffer if want is None else self._buffer[: want - size]])
            if not count:
                break
            digest.update(self._buffer[:count])
            size += count
        return digest.hexdigest(), size


_READ, _BAD, _SOUND = "read", "bad", "sound"


def _as_findings(bad: Iterable[_Bad]) -> list[Finding]:
    by_path: dict[str, list[_Bad]] = {}
    for one in bad:
        by_path.setdefault(one.unit.file.path, []).append(one)
    return [_finding(several) for several in by_path.values()]


def _finding(bad: list[_Bad]) -> Finding:
    first, file = bad[0], bad[0].unit.file
    for one in bad:
        if one.sha256 is None and not one.why:
            return Finding(file.path, "mismatched", f"{file.size} bytes", f"{one.size} bytes")
    if file.blocks:
        return in_ranges(file.path, file.sha256, [(one.unit.start, one.unit.end, one.why) for one in bad])
    if first.why:
        return Finding(file.path, "unreadable", f"sha256 {file.sha256}", first.why)
    if first.size != file.size:
        return Finding(file.path, "mismatched", f"{file.size} bytes", f"{first.size} bytes when read")
    return Finding(file.path, "mismatched", f"sha256 {file.sha256}", f"sha256 {first.sha256}")
