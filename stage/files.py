"""Files: their bytes and digests, the space that they need, sizes in words, pointers of Git LFS.

Each file is read once, for all its digests. A digest has an algorithm (`Digest`). `sha256` is ours;
a Hub publishes `lfs-sha256` or `git-sha1` of a file before it is downloaded. `Expected` is what the
bytes of a file must be.

A pointer of Git LFS is a few lines of text in place of a file whose content was not pulled. It has
the file's name (github.com/git-lfs/git-lfs, docs/spec.md).
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from stage.errors import IncompleteError, UsageError, quoted

MAX_NUMBER = 2**63 - 1  # every reader of JSON and every file system can hold it
MAX_TEXT = 2 * 2**30  # bytes: the lock of five million files
_PART = 2**22  # bytes read in one go


def read_file(path: Path, most: int = MAX_TEXT, *, follow: bool = True) -> bytes:
    """The bytes of a file that another user may have put there. It does not wait for a pipe or a
    device.

    Args:
        most: bytes that it may have.
        follow: whether a link at `path` is followed.

    Raises:
        OSError: it cannot be read, is no regular file, or is larger than `most`; see `strerror`.
    """
    if not follow and path.is_symlink():
        raise OSError(errno.ELOOP, "a link, not a file", str(path))
    with _open_regular(path) as file:
        status = os.fstat(file.fileno())
        if status.st_size > most:
            raise OSError(errno.EFBIG, f"larger than the {human_size(most)} it may have", str(path))
        # Not `read(most)`: that allocates so many bytes before it reads the first.
        parts, size = list[bytes](), 0
        while size <= most and (part := file.read(_PART)):
            parts.append(part)
            size += len(part)
    if size > most:  # it grew meanwhile, or the system states a wrong size
        raise OSError(errno.EFBIG, f"larger than the {human_size(most)} it may have", str(path))
    return b"".join(parts)


def read_start(path: Path, size: int) -> bytes:
    """The first bytes of a file that another user may have put there; at most `size` of them.

    Raises:
        OSError: it cannot be read, or is no regular file; see `strerror`.
    """
    with _open_regular(path) as file:
        return file.read(size)


def open_inside(root: Path, path: Path) -> IO[bytes]:
    """Opens a regular file below a folder that other users may write. It follows no link below
    `root`, and does not wait for a pipe.

    Raises:
        OSError: it cannot be opened, is no regular file, or a link is on the way; see `strerror`.
    """
    *parts, name = path.relative_to(root).parts
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for part in parts:
            above = folder
            folder = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=above)
            os.close(above)
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        return _regular(os.open(name, flags, dir_fd=folder), path)
    finally:
        os.close(folder)


def _open_regular(path: Path) -> IO[bytes]:
    """Opens a regular file. It neither waits for a pipe nor takes bytes out of one."""
    return _regular(os.open(path, os.O_RDONLY | os.O_NONBLOCK), path)


def _regular(descriptor: int, path: Path) -> IO[bytes]:
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        raise OSError(errno.EINVAL, "a pipe or device, not a file", str(path))
    return open(descriptor, "rb")


def write_atomically(path: Path, data: bytes | Iterable[bytes]) -> None:
    """Writes a small file. A reader sees the old one or the new one, also after a crash.

    Args:
        data: the bytes, or pieces of them.

    Raises:
        OSError: the folder cannot be written.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.partial")
    check_writable(path.parent)
    try:
        with open(temporary, "wb") as target:
            target.writelines((data,) if isinstance(data, bytes) else data)
            target.flush()
            os.fsync(target.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def check_writable(folder: Path) -> None:
    """Checks whether files can be made in a folder. So the message names the folder that the user
    gave.

    Args:
        folder: if it does not exist, its nearest parent is checked.

    Raises:
        OSError: they cannot; see `strerror`.
    """
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if folder.is_dir() and not os.access(folder, os.W_OK | os.X_OK):
        flags = os.statvfs(folder).f_flag
        code = errno.EROFS if flags & os.ST_RDONLY else errno.EACCES
        raise OSError(code, os.strerror(code), str(folder))


def check_folder_of(file: Path, what: str = "") -> None:
    """Checks, before hours of work, whether the folder of a file to write exists.

    Args:
        what: the option that names the file, and a space.

    Raises:
        UsageError: it does not.
    """
    if not file.absolute().parent.is_dir():
        raise UsageError(
            f"{what}{file}: there is no folder {file.parent}.",
            f"mkdir -p {quoted(file.parent)}",
        )


def check_new(file: Path) -> None:
    """Checks that a file can be made, before what it will hold is asked for.

    Raises:
        UsageError: it is there.
        OSError: its folder cannot be made or written.
    """
    if file.exists():
        raise UsageError(
            f"{file}: is there already, and is not overwritten.", "Give another name with -o."
        )
    check_writable(file.parent)


def write_new(file: Path, text: str) -> None:
    """Writes a file that is not there yet, and makes its folder. Raises as `check_new`."""
    check_new(file)
    make_folder(file.parent)
    with open(file, "x", encoding="utf-8") as target:
        target.write(text)


def make_folder(folder: Path) -> None:
    """Makes a folder that a user named, and its parents.

    Raises:
        UsageError: no folder can be there: in /proc, behind a broken link.
        OSError: the file system refuses; see `strerror`.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileNotFoundError, FileExistsError) as error:
        raise UsageError(
            f"{folder}: no folder can be made there ({error.strerror}).",
            "Choose another place, on a disk of yours.",
        ) from None


def sync_folder(folder: Path) -> None:
    """Makes renames in a folder survive a power cut. Of a file: puts its bytes on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_disk(folder: Path) -> bool:
    """Puts a folder on its disk, with all that was written to that disk, by one syncfs(2).

    Returns:
        False where this system has no syncfs: then each file was synced by itself.

    Raises:
        OSError: the disk failed, or is full. (Linux before 5.8 does not report failed writes.)
    """
    import ctypes  # slow to import; `stage verify` has to begin at once

    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "syncfs"):
        for path in (folder, *folder.rglob("*")):
            sync_folder(path)
        return False
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        if libc.syncfs(descriptor) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), str(folder))
    finally:
        os.close(descriptor)
    return True


def check_space(folder: Path, needed: int, more: str = "") -> None:
    """Checks whether the disk has enough space.

    Args:
        folder: of the files to write; its nearest existing parent is checked.
        needed: bytes.
        more: what else can be freed there.

    Raises:
        IncompleteError: it has not; states how much is missing.
    """
    free = free_space(folder)
    if needed > free:
        raise IncompleteError(
            f"{folder}: {human_size(needed)} are needed and {human_size(free)} are free: "
            f"{human_size(needed - free)} are missing. Nothing was written.",
            f"Free {human_size(needed - free)} there{more}, or choose another folder with -o.",
        )


def free_space(folder: Path) -> int:
    """Bytes free on the disk of a folder that may not exist yet."""
    import shutil  # slow to import; `stage verify` has to begin at once

    place = folder.absolute()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def format_age(seconds: float) -> str:
    """`40 s`, `12 min`, `5 h`, `3 days`."""
    from stage.bundle.verifier import age  # not at the top: `stage --help` does not need it

    return age(seconds)


def human_size(size: int | float) -> str:
    """Bytes in decimal units, as the Hub shows them: `1.34 GB`."""
    value, unit = float(size), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 999.5:
            break
        value, unit = value / 1000, larger
    return f"{value:.0f} {unit}" if unit == "B" or value >= 999.5 else f"{value:.3g} {unit}"


def human_count(number: int, noun: str) -> str:
    """`1 file`, `1,234 files`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def join_limited(things: Sequence[str], most: int) -> str:
    """`a, b and 3 more`: the first of a list that may be long."""
    shown = ", ".join(things[:most])
    return f"{shown} and {len(things) - most:,} more" if len(things) > most else shown


def is_file(path: Path) -> bool:
    """Whether the file exists. An impossible name (too long, with a zero byte) does not."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


_LARGEST = 1023  # bytes: a pointer is smaller than 1024
_SMALLEST = 110  # bytes of the shortest text that _POINTER matches
_POINTER = re.compile(
    rb"version https://(?:git-lfs|hawser)\.github\.com/spec/v1\r?\n(?:[a-z0-9.-]+ .*\n)*"
    rb"oid sha256:[0-9a-f]{64}\r?\n"
)


def is_pointer(path: Path, size: int | None = None) -> bool:
    """Whether a file is a pointer.

    Args:
        size: bytes, if known: a large file is not opened.

    Raises:
        OSError: it cannot be read.
    """
    size = path.stat().st_size if size is None else size
    if not _SMALLEST <= size <= _LARGEST:
        return False
    with open(path, "rb", buffering=0) as file:
        return _POINTER.match(file.read(_LARGEST)) is not None


PIECE = 2**20  # bytes read, received and hashed at a time

_LENGTHS = {"sha256": 64, "lfs-sha256": 64, "git-sha1": 40}


@dataclass(frozen=True, order=True)
class Digest:
    """A digest and its algorithm: `sha256`, `lfs-sha256` (of a Hub's LFS file) or `git-sha1` (a git
    blob id).

    Raises:
        ValueError: unknown algorithm, or a value that is not lowercase hex of the algorithm's
            length.
    """

    algorithm: str
    value: str

    def __post_init__(self) -> None:
        if self.algorithm not in _LENGTHS:
            raise ValueError(f"unknown digest algorithm {self.algorithm!r}")
        if not is_hex(self.value, _LENGTHS[self.algorithm]):
            digits = _LENGTHS[self.algorithm]
            raise ValueError(
                f"{self.algorithm} is {digits} lowercase hex digits, not {self.value!r}"
            )


def is_hex(value: object, length: int) -> bool:
    """Whether `value` is text of exactly `length` lowercase hex digits."""
    try:
        # Half the time of a regular expression; a lock of 20,000 files has 30,000 digests.
        return (
            isinstance(value, str) and len(value) == length and bytes.fromhex(value).hex() == value
        )
    except ValueError:
        return False


@dataclass(frozen=True, slots=True)
class FileDigests:
    """The digests of a file: git blob id if it was requested."""

    size: int
    sha256: str
    git_sha1: str | None = None

    def found(self, algorithm: str) -> str | None:
        """The digest by `algorithm`; None if it was not computed."""
        return self.git_sha1 if algorithm == "git-sha1" else self.sha256


class MismatchError(Exception):
    """Bytes that are not the expected ones.

    Attributes:
        problem: how they differ, for a message.
        found: the digests that they have.
    """

    def __init__(self, problem: str, found: FileDigests) -> None:
        super().__init__(problem)
        self.problem, self.found = problem, found


@dataclass(frozen=True)
class Expected:
    """What a file must be, as a lock, a manifest or a server says it before its bytes are here.

    Attributes:
        path: where its source has it: a path in a repository or a folder, or an address.
        size: bytes; None while unknown.
        sha256: hex; None while unknown.
        upstream: the digest that the source published, if any.
    """

    path: str
    size: int | None
    sha256: str | None = None
    upstream: Digest | None = None

    @property
    def evidence(self) -> tuple[Digest, ...]:
        """The known digests, the source's own first."""
        own = () if self.sha256 is None else (Digest("sha256", self.sha256),)
        return own if self.upstream is None else (self.upstream, *own)

    @property
    def needs_git(self) -> bool:
        """Whether the git blob id has to be computed as well."""
        return self.upstream is not None and self.upstream.algorithm == "git-sha1"

    def check(self, digests: FileDigests) -> FileDigests:
        """The digests of bytes that were hashed on their way, if they are the expected ones.

        Raises:
            MismatchError: they are not.
        """
        if self.size not in (None, digests.size):
            raise MismatchError(f"it has {digests.size:,} bytes, not {self.size:,}", digests)
        for digest in self.evidence:
            found = digests.found(digest.algorithm)
            if found != digest.value:
                raise MismatchError(
                    f"its {digest.algorithm} is {found}, not {digest.value}", digests
                )
        return digests

    def verify(self, path: Path, progress: Callable[[int], None] | None = None) -> FileDigests:
        """The digests of a file whose bytes are the expected ones.

        Args:
            progress: called with the number of bytes just read.

        Raises:
            MismatchError: they are not.
            OSError: the file cannot be read.
        """
        return self.check(hash_file(path, git=self.needs_git, progress=progress))


class Digester:
    """Digests of a stream whose length is known: call `update` with its bytes, then `result`.

    Args:
        size: the number of bytes to come. A git blob id hashes the length first
            (`sha1(b"blob <size>\\0" + data)`, git's Documentation/gitformat-pack).
        git: also compute the git blob id.
    """

    def __init__(self, size: int, *, git: bool = False) -> None:
        self._sha256 = hashlib.sha256()
        # sha1 identifies a published file; it protects nothing (`usedforsecurity`: FIPS systems).
        self._git = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False) if git else None
        self.size = 0

    def update(self, data: bytes | memoryview) -> None:
        """Adds the next bytes."""
        self._sha256.update(data)
        if self._git is not None:
            self._git.update(data)
        self.size += len(data)

    def result(self) -> FileDigests:
        """The digests of all bytes seen."""
        git = self._git.hexdigest() if self._git is not None else None
        return FileDigests(self.size, self._sha256.hexdigest(), git)


def hash_file(
    path: Path, *, git: bool = False, progress: Callable[[int], None] | None = None
) -> FileDigests:
    """Reads a file once and returns its digests.

    Args:
        progress: called with the number of bytes just read.

    Raises:
        OSError: the file cannot be read. (A file that changes its length meanwhile has a wrong git
            id.)
    """
    with open(path, "rb", buffering=0) as source:
        size = os.fstat(source.fileno()).st_size
        # A buffer of PIECE bytes for each of 100,000 small files takes longer than the hashing.
        piece = min(PIECE, size + 1)
        digester = Digester(size, git=git)
        feed(digester, lambda most: source.read(min(most, piece)), progress=progress)
        return digester.result()


def feed(
    digester: Digester,
    read: Callable[[int], bytes | None],
    *,
    progress: Callable[[int], None] | None = None,
) -> int:
    """Passes bytes from `read` to `digester` until the end; returns how many."""
    total = 0
    while piece := read(PIECE):
        digester.update(piece)
        total += len(piece)
        if progress:
            progress(len(piece))
    return total


def sha256_of_bytes(data: bytes) -> str:
    """The sha256 of bytes in memory, as hex."""
    return hashlib.sha256(data).hexdigest()
