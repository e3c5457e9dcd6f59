"""Folders and names that mean something else on the job's nodes. Pure, but for `hosts_file`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from runner.disks import disk_type
from runner.job.findings import Finding

IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs"})
LOCAL_DISKS = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "overlay"})
LOCAL_NAMES = ("/tmp", "/var/tmp", "/local", "/localscratch", "/scratch_local", "/dev/shm", "/nvme")
"""Folders that are a node's own at most sites. `/scratch` is shared at many."""
HOSTS = Path("/etc/hosts")


def check_places(folders: Mapping[str, Path], mounts: str) -> list[Finding]:
    """Finds folders of a job that only this node has.

    Args:
        folders: what it is, such as `the run folder` -> its path.
        mounts: the text of `/proc/self/mounts`.
    """
    found = []
    for what, path in folders.items():
        kind = disk_type(path, mounts)
        in_memory = kind in IN_MEMORY
        if in_memory or (kind in LOCAL_DISKS and any(map(path.is_relative_to, LOCAL_NAMES))):
            where = "this node's memory" if in_memory else "a disk of this node"
            found.append(
                Finding(
                    "warning",
                    f"{what} {path} is on {where} ({kind}): the job's nodes have "
                    "their own, in which it is not.",
                    "Use a folder on the shared disk; `runner rehearse RUN --bundle B --job` "
                    "shows what a node sees.",
                )
            )
    return found


def check_own_name(host: str, hosts: str, nodes: int) -> list[Finding]:
    """Finds a host whose name is a loopback address in /etc/hosts, as Debian writes it.

    Other nodes that are given this name would connect to themselves.

    Args:
        host: this machine's name.
        hosts: the text of /etc/hosts (hosts(5)).
        nodes: nodes of the job.
    """
    if nodes < 2:
        return []
    for line in hosts.splitlines():
        address, *names = line.partition("#")[0].split() or [""]
        if address.startswith("127.") and {host, host.partition(".")[0]} & set(names):
            return [
                Finding(
                    "note",
                    f"{HOSTS} here says that {host} is {address}. If the compute nodes have such "
                    f"a line, ranks on {nodes} nodes cannot meet.",
                    "Compare on a node: getent hosts $(hostname)",
                )
            ]
    return []


def hosts_file() -> str:
    """Returns the text of /etc/hosts; empty if it cannot be read."""
    try:
        return HOSTS.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
