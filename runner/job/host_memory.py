"""How much memory of this node the processes of a job may use."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator, Mapping
from pathlib import Path


def host_memory(environ: Mapping[str, str]) -> int:
    """Returns the bytes of this node's memory that the processes of this job may use.

    It is the smallest limit of the machine, the cgroups and Slurm.
    """
    cgroups = [limit for limit, _ in _cgroups()]
    return min([machine_memory(), *cgroups, *_limits_of_slurm(environ)])


def machine_memory() -> int:
    """Returns the bytes of this machine's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def is_limited(environ: Mapping[str, str]) -> bool:
    """Whether the processes of this job may use less than all memory of this machine."""
    address_space = resource.getrlimit(resource.RLIMIT_AS)[0]
    return host_memory(environ) < machine_memory() or address_space != resource.RLIM_INFINITY


def free_on_machine() -> list[int]:
    """Returns the bytes of this machine's memory that are free; nothing where Linux is not."""
    try:
        return [_lines_of(Path("/proc/meminfo"))["MemAvailable"]]
    except (OSError, KeyError):
        return []


def data_limit(ranks: int, environ: Mapping[str, str]) -> int:
    """Returns the `RLIMIT_DATA` that keeps this rank in its share of what is free, less a tenth.

    What is free: on this machine, in the cgroups, of what Slurm gives, and under `ulimit -v` and
    `-d`. The share comes to what the rank has already, so the limit is never below that. It counts
    private memory that can be written, which is what torch allocates.

    Args:
        ranks: how many on this node take their share at this moment.
    """
    status = _lines_of(Path("/proc/self/status"))
    free = [size // ranks for size in (*free_on_machine(), *(free for _, free in _cgroups()))]
    free += [limit // ranks - status["VmRSS"] for limit in _limits_of_slurm(environ)]
    for kind, used in (
        (resource.RLIMIT_AS, status["VmSize"]),
        (resource.RLIMIT_DATA, status["VmData"]),
    ):
        soft = resource.getrlimit(kind)[0]
        free += [soft - used] if soft != resource.RLIM_INFINITY else []
    return status["VmData"] + max(0, min(free)) * 9 // 10


def _limits_of_slurm(environ: Mapping[str, str]) -> list[int]:
    """Returns the bytes that Slurm gives a job on each node.

    Slurm's variables are in MB; 0 means all memory of the node.
    """
    total, each = environ.get("SLURM_MEM_PER_NODE", ""), environ.get("SLURM_MEM_PER_CPU", "")
    cpus = environ.get("SLURM_CPUS_ON_NODE", "")
    if total.isdigit() and int(total):
        return [int(total) * 2**20]
    return (
        [int(each) * int(cpus) * 2**20] if each.isdigit() and cpus.isdigit() and int(each) else []
    )


def _cgroups() -> Iterator[tuple[int, int]]:
    """The limit and the free memory (bytes) of the cgroups of this process and their parents.

    Version 2 has the limit in `memory.max`, version 1 in `memory.limit_in_bytes`. The kernel takes
    the memory of cached files back before it kills.
    """
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = Path("/sys/fs/cgroup", "memory" if controllers else "")
        names = ("limit_in_bytes", "usage_in_bytes") if controllers else ("max", "current")
        own = root / path.lstrip("/")
        for folder in (own, *own.parents):
            if folder.is_relative_to(root):
                limit, used = (_number_in(folder / f"memory.{name}") for name in names)
                if limit is not None:
                    yield limit, limit - (used or 0) + _cached(folder / "memory.stat")


def _cached(path: Path) -> int:
    """The bytes of cached files of a cgroup; version 1 has those of its children in `total_...`."""
    try:
        lines = _lines_of(path)
    except OSError:
        return 0
    found = (
        lines.get(f"total_{name}", lines.get(name, 0)) for name in ("inactive_file", "active_file")
    )
    return sum(found)


def _lines_of(path: Path) -> dict[str, int]:
    """The numbers (bytes) in a file of Linux with a name and a size on each line."""
    fields = (line.split() for line in path.read_text(encoding="utf-8").splitlines())
    return {
        name.rstrip(":"): int(size) * (1024 if unit else 1)
        for name, size, *unit in (few for few in fields if len(few) in (2, 3))
        if size.isdecimal() and unit in ([], ["kB"])
    }


def _number_in(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="utf-8").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
