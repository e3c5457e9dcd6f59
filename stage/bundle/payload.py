"""Reads a payload and compares it with its digests, on every core.

Processes (`stage.processes`) take the files in batches, the largest files first. The batches
get smaller towards the end, so that no process is left alone with much to read. One file is read by
one process.
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

from stage.bundle.report import Finding
from stage.bundle.stamp import Stamp, stamp_of
from stage.errors import NO_MEANS
from stage.processes import MOST_PIECES, Send, Workers

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
    """A file to read: path in the bundle, bytes, sha256."""

    path: str
    size: int
    sha256: str


class Batch(NamedTuple):
    """Files that were read together and are sound.

    Attributes:
        places: the files' indices in the list of all.
        stamp: of the files.
    """

    places: range
    stamp: Stamp


class Readback(NamedTuple):
    """The result of reading: a finding for each bad file, and the stamp of the sound ones."""

    findings: tuple[Finding, ...] = ()
    stamp: Stamp = Stamp()


def in_order(files: Iterable[PayloadFile]) -> list[PayloadFile]:
    """Everything to read, the largest file first; the same for the same `files`."""
    return sorted(sorted(files), key=attrgetter("size"), reverse=True)


def batches(work: Sequence[PayloadFile], jobs: int, skip: Sequence[range] = ()) -> list[range]:
    """Divides the work: each batch is a part of the rest, so that all processes end together.

    Args:
        skip: ranges of indices that need no reading. No batch contains one.

    Returns:
        At most `MOST_PIECES` ranges of indices.
    """
    costs = [file.size + COST_OF_OPENING for file in work]
    for run in skip:
        costs[run.start : run.stop] = [0] * len(run)
    before = [0, *accumulate(costs)]  # the cost of all files before an index
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
    work: Sequence[PayloadFile],
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
    findings, stamp = [], Stamp()
    try:
        with Workers(_Reader(folder, work, shared).read, len(shared), jobs) as workers:
            for kind, *rest in workers.messages():
                if kind == _READ and progress:
                    progress(*rest)
                elif kind == _BAD:
                    place, digest, size, why = rest
                    if why in NO_MEANS:
                        raise OSError(why, os.strerror(why), work[place].path)
                    findings.append(_finding(work[place], digest, size, why))
                elif kind == _SOUND:
                    number, sums = rest
                    batch = Batch(shared[number], Stamp(*sums))
                    stamp = stamp.plus(batch.stamp)
                    if keep:
                        keep(batch)
    finally:
        os.close(folder)
    return Readback(tuple(findings), stamp)


class _Reader:
    """Reads batches of `work` below the folder of a descriptor, in any process."""

    def __init__(self, folder: int, work: Sequence[PayloadFile], batches: Sequence[range]) -> None:
        self._folder = folder
        self._work = work
        self._batches = batches
        self._buffer = memoryview(b"")
        self._unreported = 0

    def read(self, number: int, send: Send) -> None:
        """Reads one batch; sends the bytes read, the bad files, and the stamp of a sound batch."""
        places = self._batches[number]
        stamp = stamp_of(self._sound(places, send))
        if stamp.files == len(places):
            send([_SOUND, number, stamp])

    def _sound(self, places: range, send: Send) -> Iterator[tuple[str, os.stat_result]]:
        """Reads these files; yields path and status of each sound one."""
        for place in places:
            file = self._work[place]
            digest, size = None, 0
            try:
                source = os.open(file.path, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=self._folder)
                try:
                    status = os.fstat(source)
                    if status.st_size == file.size:
                        digest, size = self._hash(source, file.size, send)
                finally:
                    os.close(source)
            except OSError as error:
                send([_BAD, place, None, 0, error.errno])
                continue
            if digest == file.sha256:
                yield file.path, status
            else:
                send([_BAD, place, digest, size if digest else status.st_size, 0])
        send([_READ, self._unreported])
        self._unreported = 0

    def _hash(self, source: int, end: int, send: Send) -> tuple[str, int]:
        """sha256 and length of the file as it is, also of added bytes."""
        if end <= SMALL:
            data = os.read(source, end + 1)
            if len(data) == end:
                self._report(end, send)
                return sha256(data).hexdigest(), end
            os.lseek(source, 0, os.SEEK_SET)  # it changed, or was read in parts: the slow way
        if not self._buffer:
            self._buffer = memoryview(mmap(-1, BUFFER_SIZE, access=ACCESS_COPY))
        digest, size = sha256(), 0
        while count := os.readv(source, [self._buffer]):
            digest.update(self._buffer[:count])
            size += count
            self._report(count, send)
        return digest.hexdigest(), size

    def _report(self, count: int, send: Send) -> None:
        self._unreported += count
        if self._unreported >= REPORT_EVERY:
            send([_READ, self._unreported])
            self._unreported = 0


_READ, _BAD, _SOUND = "read", "bad", "sound"


def _finding(file: PayloadFile, digest: str | None, size: int, why: int) -> Finding:
    """What is wrong with a file.

    Args:
        digest, size: as it is; None: not read, because of its size or of `why`.
        why: the number of the system's error; 0: none.
    """
    if why:
        return Finding(file.path, "unreadable", f"sha256 {file.sha256}", os.strerror(why))
    if digest is None:
        return Finding(file.path, "mismatched", f"{file.size} bytes", f"{size} bytes")
    if size != file.size:
        return Finding(file.path, "mismatched", f"{file.size} bytes", f"{size} bytes when read")
    return Finding(file.path, "mismatched", f"sha256 {file.sha256}", f"sha256 {digest}")
