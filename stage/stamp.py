"""What tells, without reading a file, that it was not touched since it was read: its `stat`, added up over many files.

Any change of a file moves its ctime, which nobody can set back; one put in its place has another inode; one gone or
new changes the count. Sums do not depend on order, so stamps of parts (of batches, of shards) add up to the whole's.
No device number: the nodes of a cluster number one and the same mount differently.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

UNSURE_NS = 2 * 10**9  # a change this close to another may not move the clock of a file system (Lustre: whole seconds)
TICK_NS = 20 * 10**6  # the clock below moves every 10 ms at the latest (the kernel's CONFIG_HZ is 100 or more)
MOUNTS = Path("/proc/self/mountinfo")  # proc(5): field 5 is the mount point, the first after "-" the kind of disk
KERNELS_OWN = frozenset({"ext4", "xfs", "btrfs", "f2fs", "tmpfs", "overlay"})  # disks stamped by this kernel's clock
_CLOCK_REALTIME_COARSE = 5  # <linux/time.h>: what the kernel stamps changes of files with; Python has no name for it


class Stamp(NamedTuple):
    """Sums over files, and the newest ctime among them (0 if there are none); times in nanoseconds."""

    files: int = 0
    size: int = 0
    inode: int = 0
    mtime: int = 0
    ctime: int = 0
    newest: int = 0

    def plus(self, other: Stamp) -> Stamp:
        """The stamp of both together."""
        sums = map(int.__add__, self, other)
        return Stamp._make(sums)._replace(newest=max(self.newest, other.newest))

    def settled(self, when_ns: int, unsure_ns: int | None = None) -> bool:
        """Whether any change after `when_ns` would be another stamp: none of the files had just been changed then.

        Args:
            unsure_ns: how far apart two changes must be to be told apart; by default on any disk.
        """
        return self.newest + (UNSURE_NS if unsure_ns is None else unsure_ns) < when_ns


def now_ns() -> int:
    """Now, by the clock that stamps changes on this machine's own disks: what changes later has no earlier stamp."""
    return time.clock_gettime_ns(_CLOCK_REALTIME_COARSE) if sys.platform == "linux" else time.time_ns()


def unsure_ns(root: Path, newest: int) -> int:
    """How far apart two changes of files below `root` must be to have different stamps.

    A tick of the kernel's clock where it is that clock that stamps them, and the disk keeps it whole: the latest stamp
    has a part below a millisecond, which a disk that keeps seconds (or FAT's 10 ms) has not. Else `UNSURE_NS`.

    Args:
        newest: the latest of their stamps.
    """
    try:
        mounts = [line.split(" ") for line in MOUNTS.read_text(encoding="utf-8").splitlines()]
        here = str(root.resolve())
        points = [(_unescaped(fields[4]).rstrip("/"), fields[fields.index("-") + 1]) for fields in mounts]
    except (OSError, ValueError, IndexError):
        return UNSURE_NS
    above = [point for point, _ in points if f"{here}/".startswith(f"{point}/")]
    disk = max(above, key=len, default="")
    kinds = {kind for point, kind in points if point == disk or point.startswith(f"{here}/")}
    fine = bool(above) and kinds <= KERNELS_OWN and newest % 10**6 != 0
    return min(TICK_NS, UNSURE_NS) if fine else UNSURE_NS


def _unescaped(point: str) -> str:
    """mountinfo writes blanks, tabs, newlines and backslashes as octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), point)


def stamp_of(statuses: Iterable[os.stat_result]) -> Stamp:
    """The stamp of these files."""
    files = size = inode = mtime = ctime = newest = 0
    for status in statuses:
        files += 1
        size += status.st_size
        inode += status.st_ino
        mtime += status.st_mtime_ns
        ctime += status.st_ctime_ns
        newest = max(newest, status.st_ctime_ns)
    return Stamp(files, size, inode, mtime, ctime, newest)
