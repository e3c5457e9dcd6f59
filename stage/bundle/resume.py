"""Keeps the progress of an interrupted verification, so that the next one resumes there.

The checkpoint is a file of the user (never in the bundle, which may be read-only and must stay a
bag). It has a line per batch that was read and found sound, with the stamp of its files. A batch
counts again only if its files still have that stamp, and only for a day: disks rot without moving
a clock. Damage is never kept, and a finished verification leaves nothing: the next one reads
everything again. (docs/adr/0006)
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import IO, NamedTuple

from stage.bundle.payload import Batch, PayloadFile
from stage.bundle.stamp import Stamp, stamp_of
from stage.files import format_age, human_size

EXPIRES_S = 24 * 3600.0
BEGINS_AFTER_S = 30.0  # less is soon read again
_MOST_RUNS = 256  # more ranges are not worth the bookkeeping


class Resumed(NamedTuple):
    """What need not be read again: ranges of files, their bytes, their stamp, since when."""

    runs: tuple[range, ...] = ()
    size: int = 0
    stamp: Stamp = Stamp()
    since: float | None = None


class VerifyCheckpoint:
    """The checkpoint of a verification of a bundle with one tag manifest.

    Args:
        folder: of all checkpoints; created if it does not exist.
        note: prints a line: what is resumed, or why nothing can be kept.
        resume: whether to use the checkpoint of an interrupted verification.
        after_s: seconds until the first batch is kept.
    """

    def __init__(
        self,
        folder: Path,
        root: Path,
        note: Callable[[str], None],
        *,
        resume: bool = True,
        after_s: float = BEGINS_AFTER_S,
    ) -> None:
        self._folder = folder
        self._root = root
        self._note = note
        self._resume = resume
        self._after_s = after_s
        self._path = folder
        self._work: Sequence[PayloadFile] = ()
        self._began = time.time()
        self._file: IO[bytes] | None = None
        self._gave_up = False

    def begin(self, seal: str, work: Sequence[PayloadFile]) -> Resumed:
        """Starts a checkpoint of reading `work`; returns what an earlier one says about it.

        Args:
            seal: sha256 of the tag manifest: what the digests of `work` come from.
        """
        about = [str(self._root.resolve()), self._root.stat().st_dev, seal]
        self._path = self._folder / f"{sha256(json.dumps(about).encode()).hexdigest()[:32]}.jsonl"
        self._work = work
        try:
            if not self._resume:
                self._path.unlink(missing_ok=True)
            lines = self._path.read_bytes().splitlines()
        except OSError:  # most often: there is none
            return Resumed()
        resumed = _resumed(self._root, work, _entries(lines, self._began - EXPIRES_S))
        if resumed.since is not None:
            total = human_size(sum(file.size for file in work))
            self._note(
                f"resumed: {human_size(resumed.size)} of {total} were read and found sound in the "
                f"last {format_age(self._began - resumed.since)}, and not touched since "
                "(--no-resume reads all again)"
            )
        return resumed

    def add(self, batch: Batch) -> None:
        """Keeps a sound batch; call it as soon as that is known."""
        now = time.time()
        began_ns = int(self._began * 10**9)
        if self._gave_up or now - self._began < self._after_s or not batch.stamp.is_older(began_ns):
            return
        ends = self._work[batch.places[0]].path, self._work[batch.places[-1]].path
        entry = [now, *ends, _expected(self._work, batch.places), batch.stamp]
        try:
            if self._file is None:
                self._file = self._open()
            self._file.write(json.dumps(entry).encode() + b"\n")
        except OSError as error:
            self._note(
                f"{self._path}: {error.strerror}: if this is interrupted, the next one starts again"
            )
            self._gave_up = True

    def _open(self) -> IO[bytes]:
        self._folder.mkdir(parents=True, exist_ok=True)
        for other in self._folder.glob("*.jsonl"):
            if other.stat().st_mtime < self._began - EXPIRES_S:
                other.unlink(missing_ok=True)
        return open(self._path, "ab", buffering=0)

    def finished(self) -> None:
        """Forgets everything: there is a verdict."""
        if self._file is not None:
            self._file.close()
        try:
            self._path.unlink()
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError as error:
            self._note(
                f"{self._path}: {error.strerror}: remove it, or the next verification resumes there"
            )


class _Entry(NamedTuple):
    """A sound batch: when, its first and last file, a digest of their sha256, their stamp."""

    at: float
    first: str
    last: str
    expected: str
    stamp: Stamp


def _entries(lines: Sequence[bytes], oldest: float) -> Iterator[_Entry]:
    """The lines that can be read (the last may be half a one) and are young enough."""
    for line in lines:
        try:
            at, first, last, expected, stamp = json.loads(line)
            if oldest < float(at) <= time.time():
                yield _Entry(at, str(first), str(last), expected, Stamp(*stamp))
        except (ValueError, TypeError):
            continue


def _resumed(root: Path, work: Sequence[PayloadFile], entries: Iterable[_Entry]) -> Resumed:
    places = {file.path: place for place, file in enumerate(work)}
    runs: list[range] = []
    total, since = Stamp(), time.time()
    for entry in entries:
        if entry.first not in places or entry.last not in places or len(runs) == _MOST_RUNS:
            continue
        run = range(places[entry.first], places[entry.last] + 1)
        if any(run.start < other.stop and other.start < run.stop for other in runs):
            continue
        if _expected(work, run) == entry.expected and _stamp(root, work, run) == entry.stamp:
            runs.append(run)
            total, since = total.plus(entry.stamp), min(since, entry.at)
    size = sum(work[place].size for run in runs for place in run)
    return Resumed(tuple(runs), size, total, since if runs else None)


def _expected(work: Sequence[PayloadFile], run: range) -> str:
    return sha256("".join(work[place].sha256 for place in run).encode()).hexdigest()


def _stamp(root: Path, work: Sequence[PayloadFile], run: range) -> Stamp | None:
    """The stamp a batch of these files would have now."""
    try:
        paths = [work[place].path for place in run]
        return stamp_of([(path, os.lstat(root / path)) for path in paths])
    except OSError:
        return None
