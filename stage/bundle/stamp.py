"""A stamp of files, from their paths and `stat`, shows without reading that they have not changed.

Each change of a file moves its ctime, which nobody can set back. A replaced file has another inode.
A file that moved has another path: to rename a folder changes no `stat` of a file in it. Sums do
not depend on the order, so the stamps of batches add up. There is no device number in it: the nodes
of a cluster number the same mount differently.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

# Two changes closer than this may have one time on some file systems (Lustre: whole seconds).
UNSURE_NS = 2 * 10**9
# `_CLOCK_REALTIME_COARSE` moves every 10 ms or faster (the kernel's CONFIG_HZ is 100 or more).
TICK_NS = 20 * 10**6
# proc(5): field 5 is the mount point, the first field after "-" the type of the file system.
MOUNTS = Path("/proc/self/mountinfo")
# File systems that take times from this kernel's clock.
KERNELS_OWN = frozenset({"ext4", "xfs", "btrfs", "f2fs", "tmpfs", "overlay"})
# <linux/time.h>: the clock of changes of files. Python has no name for it.
_CLOCK_REALTIME_COARSE = 5


class Stamp(NamedTuple):
    """Sums over files, and their newest ctime in nanoseconds (0 if there are no files).

    Attributes:
        looks: a number for each file, from a digest of its path, size, inode, mtime and ctime.
    """

    files: int = 0
    size: int = 0
    looks: int = 0
    newest: int = 0

    def plus(self, other: Stamp) -> Stamp:
        """The stamp of both together."""
        sums = map(int.__add__, self, other)
        return Stamp._make(sums)._replace(newest=max(self.newest, other.newest))

    def is_older(self, when_ns: int, unsure_ns: int | None = None) -> bool:
        """Whether any change after `when_ns` gives another stamp: no file was changed just before.

        Args:
            unsure_ns: the least time between two changes that differ; None: on any disk.
        """
        return self.newest + (UNSURE_NS if unsure_ns is None else unsure_ns) < when_ns


def now_ns() -> int:
    """Now, by the clock of changes of files: a later change has no earlier time."""
    return (
        time.clock_gettime_ns(_CLOCK_REALTIME_COARSE) if sys.platform == "linux" else time.time_ns()
    )


def unsure_ns(root: Path, newest: int) -> int:
    """The least time between two changes of files below `root` that have different times.

    It is a tick of the kernel's clock, if the file system uses that clock and keeps its full
    precision: then the newest ctime has a part below a millisecond (not so on disks that keep
    seconds, or FAT's 10 ms). Else it is `UNSURE_NS`.

    Args:
        newest: their newest ctime.
    """
    try:
        mounts = [line.split(" ") for line in MOUNTS.read_text(encoding="utf-8").splitlines()]
        here = str(root.resolve())
        points = [
            (_unescaped(fields[4]).rstrip("/"), fields[fields.index("-") + 1]) for fields in mounts
        ]
    except (OSError, ValueError, IndexError):
        return UNSURE_NS
    above = [point for point, _ in points if f"{here}/".startswith(f"{point}/")]
    disk = max(above, key=len, default="")
    kinds = {kind for point, kind in points if point == disk or point.startswith(f"{here}/")}
    fine = bool(above) and kinds <= KERNELS_OWN and newest % 10**6 != 0
    return min(TICK_NS, UNSURE_NS) if fine else UNSURE_NS


def _unescaped(point: str) -> str:
    """mountinfo writes spaces, tabs, newlines and backslashes as octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), point)


def stamp_of(found: Iterable[tuple[str, os.stat_result]]) -> Stamp:
    """The stamp of files, given their paths in the bundle with their status."""
    files = size = looks = newest = 0
    for path, status in found:
        times = status.st_mtime_ns, status.st_ctime_ns
        look = f"{path}\0{status.st_size} {status.st_ino} {times[0]} {times[1]}"
        files += 1
        size += status.st_size
        looks += int.from_bytes(sha256(os.fsencode(look)).digest()[:16], "big")
        newest = max(newest, status.st_ctime_ns)
    return Stamp(files, size, looks, newest)
