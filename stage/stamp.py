"""What tells, without reading a file, that it was not touched since it was read: its `stat`, added up over many files.

Any change of a file moves its ctime, which nobody can set back; one put in its place has another inode; one gone or
new changes the count. Sums do not depend on order, so stamps of parts (of batches, of shards) add up to the whole's.
No device number: the nodes of a cluster number one and the same mount differently.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import NamedTuple

UNSURE_NS = 2 * 10**9  # a change this close to another may not move the clock of a file system (Lustre: whole seconds)


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

    def settled(self, when_ns: int) -> bool:
        """Whether any change after `when_ns` would be another stamp: none of the files had just been changed then."""
        return self.newest + UNSURE_NS < when_ns


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
