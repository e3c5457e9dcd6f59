"""How much memory of this node the processes of a job may use."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def host_memory(environ: Mapping[str, str]) -> int:
    """Returns the bytes of this node's memory that the processes of this job may use.

    It is the smallest limit of the machine, the cgroups and Slurm.
    """
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([machine, *_limits_of_cgroups(), *_limits_of_slurm(environ)])


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


def _limits_of_cgroups() -> list[int]:
    """Returns the memory limits (bytes) of the cgroups of this process and their parents.

    Version 2 has them in `memory.max`, version 1 in `memory.limit_in_bytes`.
    """
    limits = []
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = Path("/sys/fs/cgroup", "memory" if controllers else "")
        name = "memory.limit_in_bytes" if controllers else "memory.max"
        own = root / path.lstrip("/")
        for folder in (own, *own.parents):
            if folder.is_relative_to(root):
                limits += _number_in(folder / name)
    return limits


def _number_in(path: Path) -> list[int]:
    try:
        text = path.read_text(encoding="utf-8").strip()
    except OSError:
        return []
    return [int(text)] if text.isdigit() else []
