"""Reads small files by what `manifest-sha256.txt` lists, before anything else of the bundle was looked at.

To import what reads a lock, to read it and to compare all names takes as long as to hash ten thousand small files. So
processes hash meanwhile, line by line. All they say is which lines hold: a regular file in real folders below the
root, small, with these bytes. That is believed of a path once the lock says the same of it; whatever is astray is left
to `readback`, which reads it again and has the words for it. So a manifest may claim what it likes.

It is a head start and no more: large files, and bundles of very many, are `readback`'s, which keeps a journal.
(docs/adr/0046)
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import sha256
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

from stage.bundle import MANIFEST, PAYLOAD
from stage.digest import sha256_of_bytes
from stage.disk import read_file
from stage.stamp import Stamp, now_ns, stamp_of
from stage.workers import Send, Workers

if TYPE_CHECKING:
    from stage.asset import LockedFile

SMALL = 2**16  # bytes of a file that is read here
PIECE = 2**15  # bytes of lines that are read at a time: a few hundred files, milliseconds of work
MOST = 128 * PIECE  # some 40,000 files: whoever has more waits anyway, and may want to go on where he was interrupted
LEAST = PIECE // 2  # fewer lines are not worth the processes
Payload = dict[str, tuple[int | None, str | None]]  # path -> size and sha256, as far as they are known
_MOST_LINES = PIECE // len(f"{sha256().hexdigest()}  {PAYLOAD}")  # of a piece; a message has room for as many numbers


class Sound(NamedTuple):
    """What is not known to be sound, by its path; and the stamp of what is."""

    astray: frozenset[str] = frozenset()
    stamp: Stamp = Stamp()


class _Said(NamedTuple):
    """What is said of one piece: its number, which of its lines are astray, and of the others the sizes and stamp."""

    number: int
    astray: list[int]
    sizes: str
    stamp: Stamp


class HeadStart:
    """A context manager: reading begins on entering, and has ended on leaving, be it done or not.

    Args:
        root: a folder that may be a bundle.
        jobs: processes that read. One alone has nothing to run beside: it gets no head start.
        least: bytes of manifest below which there is none either.

    Attributes:
        began, began_ns: when the first byte was read, in seconds since 1970; and by `now_ns`.
    """

    def __init__(self, root: Path, jobs: int, *, least: int = LEAST) -> None:
        self.began, self.began_ns = time.time(), now_ns()
        text = _manifest(root) if jobs > 1 else b""
        self._text = text if len(text) >= least else b""
        self._pieces = list(_cut(self._text))
        self._root = root
        self._name, self._folder = b"", -1  # of a worker: the folder whose files it reads, and its descriptor
        self._workers = Workers(self._read, len(self._pieces), jobs, joins=True)
        self._messages = self._workers.messages()
        self._said: list[_Said] = []

    def __enter__(self) -> HeadStart:
        self._workers.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._workers.__exit__(kind, value, trace)
        self._leave()

    def leaves(self, claimed: Payload) -> Payload:
        """What of a payload is not read here."""
        if not self._text:
            return claimed
        return {path: claim for path, claim in claimed.items() if claim[0] is None or claim[0] > SMALL}

    def wait(self, progress: Callable[[int], None] | None = None) -> None:
        """Returns when all is read.

        Args:
            progress: called with the number of bytes of sound files, piece by piece.

        Raises:
            IncompleteError: a process was ended from outside.
        """
        for number, astray, sizes, stamp in self._messages:
            self._said.append(_Said(number, astray, sizes, Stamp(*stamp)))
            if progress:
                progress(self._said[-1].stamp.size)

    def sound(self, implied: bytes | None, files: Sequence[LockedFile]) -> Sound:
        """What was read and is as a lock says. To be asked after `wait`.

        Args:
            implied: the manifest that it implies; None if it is no lock to go by. If what was read by is any other,
                nothing is known to be sound.
            files: what it says of each line.
        """
        astray = {file.path for file in files}
        stamp = Stamp()
        if implied != self._text:
            return Sound(frozenset(astray), stamp)
        ends = [*accumulate(piece.count(b"\n") for piece in self._pieces)]
        for said in self._said:
            held = list(files[ends[said.number - 1] if said.number else 0 : ends[said.number]])
            for place in reversed(said.astray):
                del held[place]
            if _seal(file.size for file in held) == said.sizes:
                astray.difference_update(file.path for file in held)
                stamp = stamp.plus(said.stamp)
        return Sound(frozenset(astray), stamp)

    def _read(self, number: int, send: Send) -> None:
        """Reads one piece, in whichever process; sends which lines are astray, and the sizes and stamp of the others.

        A size is the lock's to say, and no line of a manifest has one.
        """
        statuses: list[os.stat_result] = []
        astray: list[int] = []
        for place, line in enumerate(self._pieces[number].split(b"\n")[:-1]):
            status = self._status_if_it_holds(line)
            if status is None:
                astray.append(place)
            else:
                statuses.append(status)
        if len(astray) <= _MOST_LINES:
            send([number, astray, _seal(status.st_size for status in statuses), stamp_of(statuses)])

    def _status_if_it_holds(self, line: bytes) -> os.stat_result | None:
        digest, _, path = line.partition(b"  ")
        folder, _, name = path.rpartition(b"/")
        try:
            if folder != self._name or self._folder < 0:
                self._enter(folder)
            # Looked at before it is opened: a pipe would be waited for, and a device may do something.
            status = os.stat(name, dir_fd=self._folder, follow_symlinks=False)
            if not stat.S_ISREG(status.st_mode) or status.st_size > SMALL:
                return None
            source = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=self._folder)
            try:
                data = os.read(source, status.st_size + 1)
            finally:
                os.close(source)
        except (OSError, ValueError):  # ValueError: a name with a zero byte in it
            return None
        return status if len(data) == status.st_size and sha256(data).hexdigest().encode() == digest else None

    def _enter(self, path: bytes) -> None:
        """Goes into a folder of the payload, through real folders only."""
        self._leave()
        parts = path.split(b"/")
        if parts[0] != PAYLOAD.encode() or not {b"", b".", b".."}.isdisjoint(parts):
            raise ValueError("not below the payload's folder")
        self._folder = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY)
        for part in parts:
            outer = self._folder
            self._folder = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=outer)
            os.close(outer)
        self._name = path

    def _leave(self) -> None:
        if self._folder >= 0:
            os.close(self._folder)
            self._folder = -1


def _manifest(root: Path) -> bytes:
    try:
        return read_file(root / MANIFEST, MOST, follow=False)
    except OSError:  # whoever verifies has the words for it
        return b""


def _cut(text: bytes) -> Iterator[bytes]:
    """Pieces of whole lines."""
    start = 0
    while (end := (text.find(b"\n", start + PIECE) + 1 or text.rfind(b"\n", start) + 1)) > start:
        yield text[start:end]
        start = end


def _seal(sizes: Iterable[int]) -> str:
    return sha256_of_bytes(",".join(map(str, sizes)).encode())
