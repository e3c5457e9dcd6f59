"""What the driver, the kernel and torch say of this machine's GPUs."""

from __future__ import annotations

import os
import platform
import subprocess
from typing import Any

import torch

ASKED = "name,uuid,driver_version,memory.total,power.limit,ecc.mode.current,mig.mode.current"


def software() -> dict[str, Any]:
    """The versions, and the devices that torch sees. Asks for no memory on a device."""
    facts: dict[str, Any] = {"torch": torch.__version__, "device": "CPU", "devices": 0}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        facts |= {
            "CUDA of torch": torch.version.cuda,
            "device": properties.name,
            "devices": torch.cuda.device_count(),
            "capability": f"{properties.major}.{properties.minor}",
        }
    return facts


def node() -> dict[str, Any]:
    """This node, and what the driver says of its GPUs and of the links between them."""
    return {
        "host": platform.node(),
        "kernel": platform.release(),
        "processors": len(os.sched_getaffinity(0)),
        "GPUs": _driver(f"--query-gpu={ASKED}", "--format=csv,noheader"),
        "links": _driver("topo", "-m"),
    }


def _driver(*arguments: str) -> str:
    """The output of nvidia-smi; empty where there is no driver."""
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()
