"""Facts of a node that need no torch: the driver's devices, their links, limits of processes."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ASKED = (
    "name", "uuid", "driver_version", "memory.total", "power.limit", "clocks.max.sm",
    "ecc.mode.current", "mig.mode.current", "pcie.link.gen.max", "pcie.link.width.max",
)  # fmt: skip
"""Fields of `nvidia-smi --query-gpu`; one that a driver does not know is left out."""

LIMITS = {
    "open files": resource.RLIMIT_NOFILE,
    "locked memory": resource.RLIMIT_MEMLOCK,
    "processes": resource.RLIMIT_NPROC,
    "address space": resource.RLIMIT_AS,
}
SHARED_MEMORY = Path("/dev/shm")


def node_facts(environ: Mapping[str, str]) -> dict[str, Any]:
    """Looks at this node.

    Args:
        environ: the environment variables.

    Returns:
        Name -> fact, for a record.
    """
    facts: dict[str, Any] = {
        "host": platform.node(),
        "kernel": platform.release(),
        "processors": len(os.sched_getaffinity(0)),
        "memory GiB": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30,
    }
    if SHARED_MEMORY.is_dir():
        facts["/dev/shm GiB"] = shutil.disk_usage(SHARED_MEMORY).total / 2**30
    for name, number in LIMITS.items():
        soft, hard = resource.getrlimit(number)
        facts[name] = f"{_limit(soft)} of {_limit(hard)}"
    for name in ("CUDA_VISIBLE_DEVICES", "SLURM_JOB_PARTITION", "SLURM_JOB_GPUS"):
        if name in environ:
            facts[name] = environ[name]
    facts["devices"] = driver_facts()
    topology = _driver("topo", "-m")
    if topology:
        facts["links"] = topology.strip()
    return facts


def driver_facts() -> list[dict[str, str]]:
    """What the driver says of each device; empty where there is no driver."""
    asked = list(ASKED)
    while asked:
        answer = _driver(f"--query-gpu={','.join(asked)}", "--format=csv,noheader")
        if answer is not None:
            return [
                dict(zip(asked, (cell.strip() for cell in line.split(", ")), strict=False))
                for line in answer.splitlines()
                if line.strip()
            ]
        asked.pop()  # the last ones are the newest: an old driver refuses the whole question
    return []


def _driver(*arguments: str) -> str | None:
    """The output of nvidia-smi; None where it is missing, fails or hangs."""
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=30,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)
