"""A file that grows until it is whole, and the digests of what is in it: the two never part.

It grows under a `.partial` name that carries its expected digest, so that what is left of another revision is never
taken for the beginning of this one. The disk is kept busy while bytes come, so that little is left to wait for at the
end, when every byte must be there before the file gets its name.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from stage.digest import PIECE, Digest, Digester, FileDigests, feed
from stage.names import PARTIAL_SUFFIX

# Bytes handed to the kernel at a time. 2 GiB took 0.5 s of CPU in writes of 64 to 512 KiB, and 1 to 4 s in writes of
# 1 to 4 MiB (ext4, Linux 6.18).
WRITE_SIZE = 256 * 2**10
SYNC_EVERY = 64 * 2**20  # bytes; a smaller file is synced once, at its end


def partial_path(target: Path, evidence: Digest) -> Path:
    """Where a file grows: beside its target, told apart by what it is going to be."""
    name = target.name
    if len(name.encode()) > 200:  # NAME_MAX is 255
        name = hashlib.sha256(name.encode()).hexdigest()[:32]
    return target.with_name(f"{name}.{evidence.value[:12]}{PARTIAL_SUFFIX}")


class Partial:
    """A context manager: opens the file, takes over what an earlier run left in it, and closes it as it is.

    Args:
        size: bytes it is going to have; None if nobody knows: then what is there is of no use.
        git: whether its git blob id is wanted.
        progress: called with each number of bytes just taken over, come, or (negative) given up.

    Raises:
        OSError: it cannot be read or written; says which file.
    """

    def __init__(self, path: Path, size: int | None, git: bool, progress: Callable[[int], None]) -> None:
        self._size, self._git, self._progress = size, git, progress
        self._file = open(path, "a+b", buffering=0)  # noqa: SIM115 - closed by __exit__
        self._syncer = _Syncer(self._file.fileno())
        self._digester = Digester(size or 0, git=git)
        self.has_ended = False
        self.taken_over = 0  # bytes in it that an earlier run left

    def __enter__(self) -> Partial:
        here = os.fstat(self._file.fileno()).st_size
        if here and (self._size is None or here > self._size):
            self._file.truncate(0)
        elif here:
            self._file.seek(0)
            feed(self._digester, self._file.read, progress=self._progress)
        self.taken_over = self.size
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._digester.close()
        self._syncer.close()
        self._file.close()

    @property
    def is_whole(self) -> bool:
        """Whether nothing is missing: by the size announced, else because an answer came to its end."""
        return self.has_ended if self._size is None else self.size >= self._size

    @property
    def size(self) -> int:
        """Bytes so far."""
        return self._digester.size

    def restart(self) -> None:
        """Forgets everything: the server sends the file from its beginning."""
        self._file.truncate(0)
        self._progress(-self.size)
        self.taken_over = 0
        self._digester.close()
        self._digester = Digester(self._size or 0, git=self._git)

    def append(self, piece: bytes) -> None:
        """Writes and hashes the next bytes."""
        view = memoryview(piece)
        with self._naming_the_file():
            while view:
                view = view[self._file.write(view[:WRITE_SIZE]) :]
            self._syncer.wrote(len(piece))
        self._digester.update(piece)
        self._progress(len(piece))

    def finish(self) -> FileDigests:
        """Waits until every byte is on the disk; returns the digests of all of them."""
        digests = self._digester.result()
        with self._naming_the_file():
            self._syncer.finish()
        return digests

    @contextmanager
    def _naming_the_file(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:  # a full disk: say where
            raise OSError(error.errno, error.strerror, self._file.name) from None


class _Syncer:
    """Has the bytes of a growing file written to the disk while more come, by a thread of its own."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._thread: ThreadPoolExecutor | None = None  # small files need none
        self._under_way: Future[None] | None = None
        self._waiting = 0

    def wrote(self, count: int) -> None:
        """Takes note of new bytes. Raises what went wrong with earlier ones (a disk tells it only once)."""
        self._waiting += count
        if self._waiting >= SYNC_EVERY and (self._under_way is None or self._under_way.done()):
            self._finish_what_is_under_way()
            self._thread = self._thread or ThreadPoolExecutor(max_workers=1, thread_name_prefix="sync")
            self._under_way = self._thread.submit(os.fsync, self._descriptor)
            self._waiting = 0

    def finish(self) -> None:
        """Returns when everything is on the disk."""
        self._finish_what_is_under_way()
        os.fsync(self._descriptor)

    def _finish_what_is_under_way(self) -> None:
        if self._under_way is not None:
            self._under_way.result()

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()


def copy_hashed(source: Path, target: Path, size: int, progress: Callable[[int], None]) -> FileDigests:
    """A local file into place, hashed on the way, with the same promise: whole or not there.

    Raises:
        OSError: it cannot be read or written.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    path = partial_path(target, Digest("sha256", hashlib.sha256(str(source).encode()).hexdigest()))
    path.unlink(missing_ok=True)
    with open(source, "rb", buffering=0) as reader, Partial(path, size, False, progress) as partial:
        while piece := reader.read(PIECE):
            partial.append(piece)
        digests = partial.finish()
    path.replace(target)
    return digests
