"""What the numbers were taken on: nothing that names a machine or a person."""

from __future__ import annotations

import os
import platform
import re
import ssl
from datetime import datetime, timezone
from pathlib import Path


def describe(folder: Path) -> dict[str, str]:
    """What a reader needs to judge the numbers.

    Args:
        folder: where files are written and read.
    """
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "processor": f"{len(os.sched_getaffinity(0))} cores, {cpu[1] if cpu else platform.machine()}",
        "memory": f"{memory:.0f} GiB",
        "file system": _file_system(folder),
        "kernel": f"{platform.system()} {platform.release().partition('-')[0]}",
        "python": f"{platform.python_version()}, {ssl.OPENSSL_VERSION.rpartition(' ')[0].rsplit(' ', 2)[0]}",
    }


def load() -> float:
    """Processes that wanted a core in the last minute, this benchmark's own included."""
    return os.getloadavg()[0]


def _file_system(folder: Path) -> str:
    """The type of the file system that a folder is on."""
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    place = folder.resolve()
    below = [(point, kind) for point, kind in mounts if place.is_relative_to(point)]
    return max(below, key=lambda mount: len(mount[0]), default=("", "unknown"))[1]
