"""Reads a payload and compares it with its digests, on every core.

The unit of work is a 16 MiB block of a large file, or a whole small file. The digests of a large
file's blocks are in `blocks/<sha256>`. The tag manifest vouches for that list as it does for the
lock: a file of the right size of which every block matches is the file. So one 4 GiB file keeps all
cores busy, and a bad byte is known to its block. (docs/adr/0015: what an id without a signature is
worth.)

Processes (`stage.util.processes`) take the units in batches, the largest files first. The batches
get smaller towards the end, so that no process is left alone with much to read.
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
from typing import NamedTuple

from stage.bundle.stamp import Stamp, stamp_of
from stage.errors import NO_MEANS
from stage.util.digests import BLOCK_SIZE
from stage.util.processes import MOST_PIECES, Send, Workers
from stage.verify.report import Finding, in_ranges

# The memory of a worker; more was no faster. It begins a page: into a `bytearray`, which begins 16
# bytes off, the kernel copies at two thirds of the speed (AMD EPYC).
BUFFER_SIZE = 2**20
COST_OF_OPENING = 2**16  # bytes that could be read meanwhile: keeps batches of small files even
SMALL = 2**18  # bytes of a file that is read in one go
LEAST_BATCH = 2**23  # milliseconds of work
LARGEST_BATCH = 2**30
REPORT_EVERY = 2**25  # bytes between two reports of progress

Progress = Callable[[int], None]


class PayloadFile(NamedTuple):
    """A file to read: path in the bundle, bytes, sha256, and sha256 of its blocks where known."""

    path: str
    size: int
    sha256: str
    blocks: tuple[str, ...] = ()


class Unit(NamedTuple):
    """Bytes `start` to `end` of a file, and their sha256; the whole file unless it has blocks."""

    file: PayloadFile
    start: int
    end: int
    sha256: str


class Batch(NamedTuple):
    """Units that were read together and are sound, and the stamps of their files.

    Attributes:
        places: the units' indices in the list of all.
        stamp: of the files that begin in this batch, each once.
        others: of the files of units that do not begin their file, one for each unit.
    """

    places: range
    stamp: Stamp
    others: Stamp


class Readback(NamedTuple):
    """The result of reading: a finding for each bad file, and the stamp of the sound ones."""

    findings: tuple[Finding, ...] = ()
    stamp: Stamp = Stamp()


class _Bad(NamedTuple):
    """A unit that is not as it should be: its digest (None: not read), its length, or why not."""

    unit: Unit
    sha256: str | None
    size: int
    why: str


def units(files: Iterable[PayloadFile]) -> list[Unit]:
    """Everything to read, the largest file first; the same for the same `files`."""
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
    return ordered


def batches(work: Sequence[Unit], jobs: int, skip: Sequence[range] = ()) -> list[range]:
    """Divides the work: each batch is a part of the rest, so that all processes end together.

    Args:
        skip: ranges of indices that need no reading. No batch contains one.

    Returns:
        At most `MOST_PIECES` ranges of indices.
    """
    costs = [unit.end - unit.start + COST_OF_OPENING for unit in work]
    for run in skip:
        costs[run.start : run.stop] = [0] * len(run)
    before = [0, *accumulate(costs)]  # the cost of all units before an index
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
    """The ranges between `runs`, from 0 to `end`."""
    start = 0
    for run in sorted(runs, key=attrgetter("start")):
        yield range(start, run.start)
        start = run.stop
    yield range(start, end)


def read_back(
    root: Path,
    work: Sequence[Unit],
    jobs: int,
    skip: Sequence[range] = (),
    *,
    progress: Progress | None = None,
    keep: Callable[[Batch], None] | None = None,
) -> Readback:
    """Reads files and compares them with their digests.

    Args:
        jobs: processes that read.
        skip: ranges of indices of `work` that need no reading.
        progress: called with the number of bytes just read.
        keep: called with each sound batch, as soon as that is known.

    Raises:
        IncompleteError: a process was ended from outside.
        OSError: a process had not enough memory or descriptors.
    """
    shared = batches(work, jobs, skip)
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    bad, stamp = [], Stamp()
    try:
        with Workers(_Reader(folder, work, shared).read, len(shared), jobs) as workers:
            for kind, *rest in workers.messages():
                if kind == _READ and progress:
                    progress(*rest)
                elif kind == _BAD:
                    place, digest, size, why = rest
                    if why in NO_MEANS:
                        raise OSError(why, os.strerror(why), work[place].file.path)
                    bad.append(_Bad(work[place], digest, size, os.strerror(why) if why else ""))
                elif kind == _SOUND:
                    number, sums, others = rest
                    batch = Batch(shared[number], Stamp(*sums), Stamp(*others))
                    stamp = stamp.plus(batch.stamp)
                    if keep:
                        keep(batch)
    finally:
        os.close(folder)
    return Readback(tuple(_as_findings(bad)), stamp)


class _Reader:
    """Reads batches of `work` below the folder of a descriptor, in any process."""

    def __init__(self, folder: int, work: Sequence[Unit], batches: Sequence[range]) -> None:
        self._folder = folder
        self._work = work
        self._batches = batches
        self._buffer = memoryview(b"")

    def read(self, number: int, send: Send) -> None:
        """Reads one batch; sends the bytes read, the bad units, and the stamp of a sound batch."""
        places = self._batches[number]
        others: list[os.stat_result] = []
        stamp = stamp_of(self._sound(places, others, send))
        if stamp.files + len(others) == len(places):
            send([_SOUND, number, stamp, stamp_of(others)])

    def _sound(
        self, places: range, others: list[os.stat_result], send: Send
    ) -> Iterator[os.stat_result]:
        """Reads these units; yields the status of the file of each sound one that begins it."""
        read = 0
        for place in places:
            file, start, end, expected = self._work[place]
            digest, size = None, 0
            try:
                source = os.open(file.path, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=self._folder)
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
            if read >= REPORT_EVERY:
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
        """sha256 and length of the unit as it is; of a whole file, also of added bytes."""
        if end <= SMALL:
            data = os.read(source, end + 1)
            if len(data) == end:
                return sha256(data).hexdigest(), end
            os.lseek(source, 0, os.SEEK_SET)  # it changed, or was read in parts: the slow way
        if not self._buffer:
            self._buffer = memoryview(mmap(-1, BUFFER_SIZE, access=ACCESS_COPY))
        want = end - start if file.blocks else None
        digest, size = sha256(), 0
        if start:
            os.lseek(source, start, os.SEEK_SET)
        while want is None or size < want:
            count = os.readv(
                source, [self._buffer if want is None else self._buffer[: want - size]]
            )
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
        return in_ranges(
            file.path, file.sha256, [(one.unit.start, one.unit.end, one.why) for one in bad]
        )
    if first.why:
        return Finding(file.path, "unreadable", f"sha256 {file.sha256}", first.why)
    if first.size != file.size:
        return Finding(
            file.path, "mismatched", f"{file.size} bytes", f"{first.size} bytes when read"
        )
    return Finding(file.path, "mismatched", f"sha256 {file.sha256}", f"sha256 {first.sha256}")
