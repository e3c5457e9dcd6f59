"""A file that grows until it is whole, together with the digests of its bytes.

It grows under a `.partial` name that contains its expected digest, so that a partial file of
another revision is never resumed as this one. Nothing is synced to the disk here: a fetch syncs
once, before its bundle is finished (`stage.files.sync_disk`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from stage.errors import DamageError
from stage.files import (
    PIECE,
    Digest,
    Digester,
    Expected,
    FileDigests,
    MismatchError,
    feed,
    sha256_of_bytes,
)
from stage.paths import PARTIAL_SUFFIX

# Bytes per write. 2 GiB took 0.5 s of CPU in writes of 64 to 512 KiB, and 1 to 4 s in writes of
# 1 to 4 MiB (ext4, Linux 6.18).
WRITE_SIZE = 256 * 2**10


def partial_path(target: Path, evidence: Digest) -> Path:
    """The path of the partial file: beside its target, named after its expected digest."""
    name = target.name
    if len(name.encode()) > 200:  # NAME_MAX is 255
        name = sha256_of_bytes(name.encode())[:32]
    return target.with_name(f"{name}.{evidence.value[:12]}{PARTIAL_SUFFIX}")


class Partial:
    """A context manager: opens the partial file and takes over what an earlier run left.

    Args:
        size: bytes of the whole file; None if unknown. Then bytes of an earlier run are dropped.
        git: also compute the git blob id.
        progress: called with each count of bytes: taken over, new, or (negative) discarded.

    Attributes:
        size: bytes so far.
        taken_over: bytes in it that an earlier run left.
        resumed: whether its bytes came over several connections.

    Raises:
        OSError: the file cannot be read or written; the error names it.
    """

    def __init__(
        self, path: Path, size: int | None, git: bool, progress: Callable[[int], None]
    ) -> None:
        self._path, self._whole, self._git, self._progress = path, size, git, progress
        self._file = open(path, "a+b", buffering=0)  # noqa: SIM115 - closed by __exit__
        self._digester = Digester(size or 0, git=git)
        self.taken_over = 0
        self.resumed = False

    def __enter__(self) -> Partial:
        here = os.fstat(self._file.fileno()).st_size
        if here and (self._whole is None or here > self._whole):
            self._file.truncate(0)
        elif here:
            self._file.seek(0)
            self.taken_over = feed(self._digester, self._file.read, progress=self._progress)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()
        if isinstance(error, DamageError | MismatchError):  # its bytes are of no use
            self._path.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:  # such as a full disk
            error.filename = str(self._path)

    @property
    def size(self) -> int:
        return self._digester.size

    def restart(self) -> None:
        """Discards all bytes: the server sends the file from its beginning."""
        self._file.truncate(0)
        self._progress(-self.size)
        self.taken_over = 0
        self._digester = Digester(self._whole or 0, git=self._git)

    def append(self, piece: bytes) -> None:
        """Writes and hashes the next bytes."""
        view = memoryview(piece)
        while view:
            view = view[self._file.write(view[:WRITE_SIZE]) :]
        self._digester.update(piece)
        self._progress(len(piece))

    def finish(self) -> FileDigests:
        """The digests of all bytes."""
        return self._digester.result()


def copy_verified(
    source: Path, target: Path, expected: Expected, progress: Callable[[int], None]
) -> FileDigests:
    """Copies a local file and hashes it; the target gets its name only with the expected bytes.

    Args:
        progress: called with each count of copied bytes.

    Raises:
        MismatchError: the source has other bytes.
        OSError: a file cannot be read or written.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    path = partial_path(target, Digest("sha256", sha256_of_bytes(str(source).encode())))
    path.unlink(missing_ok=True)
    size = expected.size or 0
    most = min(PIECE, size + 1)  # a whole piece of memory for each small file costs more than it
    with (
        open(source, "rb", buffering=0) as reader,
        Partial(path, size, expected.needs_git, progress) as partial,
    ):
        while piece := reader.read(most):
            partial.append(piece)
        digests = expected.check(partial.finish())
    path.replace(target)
    return digests
