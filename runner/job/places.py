"""Folders that only this node has. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from runner.disks import disk_type
from runner.job.findings import Finding, warning

IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs"})
LOCAL_DISKS = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "overlay"})
LOCAL_NAMES = ("/tmp", "/var/tmp", "/local", "/localscratch", "/scratch_local", "/dev/shm", "/nvme")
"""Folders that are a node's own at most sites. `/scratch` is shared at many."""


def check_places(folders: Mapping[str, Path], mounts: str) -> Iterator[Finding]:
    """Finds folders of a job that only this node has.

    Args:
        folders: what it is, such as `the run folder` -> its path.
        mounts: the text of `/proc/self/mounts`.
    """
    for what, path in folders.items():
        kind = disk_type(path, mounts)
        in_memory = kind in IN_MEMORY
        if in_memory or (kind in LOCAL_DISKS and any(map(path.is_relative_to, LOCAL_NAMES))):
            where = "this node's memory" if in_memory else "a disk of this node"
            yield warning(
                f"{what} {path} is on {where} ({kind}): the job's nodes have "
                "their own, in which it is not.",
                "Use a folder on the shared disk; `runner rehearse RUN --bundle B --job` "
                "shows what a node sees.",
            )
