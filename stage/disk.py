"""Small things every writer needs: a file is there whole or not at all, and sizes people can read."""

from __future__ import annotations

import errno
import os
import shlex
import stat
from collections.abc import Sequence
from pathlib import Path

from stage.errors import IncompleteError, UsageError

MAX_NUMBER = 2**63 - 1  # what every reader of JSON and every file system can hold
MAX_TEXT = 2 * 2**30  # bytes: the lock of five million files


def read_file(path: Path, most: int = MAX_TEXT, *, follow: bool = True) -> bytes:
    """The bytes of a file that somebody else may have put there: a pipe would be waited for, a device never ends.

    Args:
        most: bytes it may have.
        follow: whether a link at `path` is followed.

    Raises:
        OSError: it cannot be read, is no regular file, or is larger than `most`; `strerror` says which.
    """
    if not follow and path.is_symlink():
        raise OSError(errno.ELOOP, "a link, not a file", str(path))
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a folder is refused by `open`, in the system's words
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "a pipe or device, not a file", str(path))
        if status.st_size > most:
            raise OSError(errno.EFBIG, f"larger than the {human_size(most)} it may have", str(path))
        return file.read(most)


def write_atomically(path: Path, data: bytes) -> None:
    """Writes a small file so that a reader sees the old one or the new one, whatever happens in between.

    Raises:
        OSError: the folder cannot be written.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.partial")
    require_writable(path.parent)
    try:
        with open(temporary, "wb") as target:
            target.write(data)
            target.flush()
            os.fsync(target.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def require_writable(folder: Path) -> None:
    """Asks the file system whether files can be made in a folder, so that the answer names the folder a person knows.

    Args:
        folder: one that is not there yet means its nearest parent.

    Raises:
        OSError: they cannot; `strerror` says why.
    """
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if folder.is_dir() and not os.access(folder, os.W_OK | os.X_OK):
        flags = os.statvfs(folder).f_flag
        code = errno.EROFS if flags & os.ST_RDONLY else errno.EACCES
        raise OSError(code, os.strerror(code), str(folder))


def require_folder_of(file: Path, what: str = "") -> None:
    """Whether a file that is to be written has a folder to lie in: asked before hours of work, not after.

    Args:
        what: the option that names the file, and a space.

    Raises:
        UsageError: it has none.
    """
    if not file.absolute().parent.is_dir():
        raise UsageError(
            f"{what}{file}: there is no folder {file.parent}.", f"mkdir -p {shlex.quote(str(file.parent))}"
        )


def make_folder(folder: Path) -> None:
    """Makes a folder that a person named, and those above it.

    Raises:
        UsageError: no folder can be there at all: in /proc, behind a link to nowhere.
        OSError: the file system refuses; `strerror` says why.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileNotFoundError, FileExistsError) as error:
        raise UsageError(
            f"{folder}: no folder can be made there ({error.strerror}).", "Choose another place, on a disk of yours."
        ) from None


def sync_folder(folder: Path) -> None:
    """Makes renames in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_space(folder: Path, needed: int) -> None:
    """Refuses to begin what cannot end.

    Args:
        folder: where the bytes will go; its nearest existing parent is asked.
        needed: bytes.

    Raises:
        IncompleteError: saying how much is missing.
    """
    free = free_space(folder)
    if needed > free:
        raise IncompleteError(
            f"{folder}: {human_size(needed)} are needed and {human_size(free)} are free: "
            f"{human_size(needed - free)} are missing. Nothing was downloaded.",
            f"Free {human_size(needed - free)} there (`stage gc` drops what no bundle uses from the shared store), or "
            "choose another folder with -o.",
        )


def free_space(folder: Path) -> int:
    """Bytes free on the disk of a folder that may not be there yet."""
    import shutil  # slow to import, and `stage verify` has to begin at once

    place = folder.absolute()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def human_size(size: int | float) -> str:
    """Bytes in decimal units, as disks are sold and the Hub shows them: `1.34 GB`."""
    value, unit = float(size), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 999.5:
            break
        value, unit = value / 1000, larger
    return f"{value:.0f} {unit}" if unit == "B" or value >= 999.5 else f"{value:.3g} {unit}"


def human_count(number: int, noun: str) -> str:
    """`1 file`, `1,234 files`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def some_of(things: Sequence[str], most: int) -> str:
    """`a, b and 3 more`: the first of a list that may be long."""
    shown = ", ".join(things[:most])
    return f"{shown} and {len(things) - most:,} more" if len(things) > most else shown


def age_in_words(seconds: float) -> str:
    """`40 s`, `12 min`, `5 h`, `3 days`."""
    for size, name in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {name}"
    return f"{max(seconds, 0):.0f} s"


def is_file(path: Path) -> bool:
    """Whether there is such a file. What cannot be the name of one (too long, with a zero byte in it) is none."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False
