"""NVIDIA's and AMD's GPUs by their names, and what the driver of this machine says of them."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

GIB = 2**30
# A part of the GPU's name -> (memory of its largest version in GB, compute capability).
# Source: NVIDIA's and AMD's data sheets. torch for ROCm gives the version of the architecture
# (gfx90a: 9.0, gfx942: 9.4) as capability, and each of the two dies of an MI250 is a device.
KINDS: dict[str, tuple[int, float]] = {
    "k80": (12, 3.7),
    "p100": (16, 6.0),
    "p40": (24, 6.1),
    "v100": (32, 7.0),
    "v100s": (32, 7.0),
    "t4": (16, 7.5),
    "2080ti": (11, 7.5),
    "a100": (80, 8.0),
    "a800": (80, 8.0),
    "a30": (24, 8.0),
    "a10": (24, 8.6),
    "a10g": (24, 8.6),
    "a40": (48, 8.6),
    "a6000": (48, 8.6),
    "3090": (24, 8.6),
    "6000ada": (48, 8.9),
    "l4": (24, 8.9),
    "l40": (48, 8.9),
    "l40s": (48, 8.9),
    "4090": (24, 8.9),
    "h20": (141, 9.0),
    "h100": (94, 9.0),
    "h800": (94, 9.0),
    "h200": (141, 9.0),
    "gh200": (144, 9.0),
    "b200": (192, 10.0),
    "gb200": (192, 10.0),
    "mi210": (64, 9.0),
    "mi250": (64, 9.0),
    "mi250x": (64, 9.0),
    "mi300a": (128, 9.4),
    "mi300x": (192, 9.4),
    "mi325x": (256, 9.4),
}
BF16_SINCE, FP16_SINCE = 8.0, 7.0  # compute capability; the ranks use the same limits
ASK_S = 20
FIELDS = "name,memory.total,compute_cap,uuid,mig.mode.current"


@dataclass(frozen=True)
class Gpu:
    """A GPU, or a slice of a GPU (MIG).

    Attributes:
        memory: bytes; 0: not known, because it is cut into slices.
        capability: compute capability of CUDA; None: not known.
        uuid: the name that CUDA_VISIBLE_DEVICES may use; empty: not known.
    """

    name: str
    memory: int
    capability: float | None
    uuid: str = ""


def gpu_named(name: str) -> Gpu | None:
    """Returns the GPU with a name such as `a800`, `tesla_v100` or `NVIDIA A100-SXM4-40GB`. Pure.

    A slice of MIG (`1g.10gb`) has the memory that its profile names. Only GPUs since the A100 have
    such slices.

    Returns:
        The GPU; None: the name is unknown.
    """
    joined = re.sub(r"6000[ _-]+ada", "6000ada", name.lower())
    parts = [part.removeprefix("rtx") for part in re.findall(r"[a-z]*\d+[a-z]*", joined)]
    kind = next((part for part in parts if part in KINDS), None)
    if kind is None:
        profile = re.search(r"\d+g\.(\d+)gb", name.lower())
        return Gpu(name, int(profile[1]) * GIB, BF16_SINCE) if profile else None
    size = next((int(part[:-2]) for part in parts if re.fullmatch(r"\d+gb", part)), KINDS[kind][0])
    return Gpu(name, size * GIB, KINDS[kind][1])


def visible_of(gpus: Sequence[Gpu], visible: str | None) -> list[Gpu]:
    """Returns the GPUs that CUDA_VISIBLE_DEVICES leaves visible; none of slices (MIG). Pure.

    A list of numbers ends at the first entry that is no GPU. If the names match no GPU, all GPUs
    are returned, because the meaning of the names is not known.

    Source: CUDA C++ Programming Guide, "CUDA Environment Variables".

    Args:
        gpus: all GPUs of this node, in the driver's order.
        visible: the value of CUDA_VISIBLE_DEVICES; None: not set.
    """
    if visible is None:
        return list(gpus)
    entries = [entry.strip() for entry in visible.split(",")]
    if entries[0].startswith("GPU-"):
        named = [gpu for entry in entries for gpu in gpus if gpu.uuid.startswith(entry)]
        return named or list(gpus)
    numbers = takewhile(lambda entry: entry.isdigit() and int(entry) < len(gpus), entries)
    return [gpus[int(entry)] for entry in numbers]


def hides_all(environ: Mapping[str, str]) -> bool:
    """Returns whether CUDA_VISIBLE_DEVICES is set and does not begin with a GPU, so hides all."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    return visible is not None and not re.match(r"\s*(\d|GPU-|MIG-)", visible)


def read_driver(text: str) -> list[Gpu]:
    """Parses what `nvidia-smi --query-gpu` prints for `FIELDS`. Pure.

    Args:
        text: one GPU per line, in `--format=csv,noheader,nounits`; memory in MiB.

    Raises:
        ValueError: a line has another format.
    """
    found = []
    for line in text.splitlines():
        name, memory, capability, uuid, slices = (field.strip() for field in line.split(","))
        size = 0 if slices == "Enabled" else int(memory) * 2**20
        found.append(Gpu(name, size, float(capability), uuid))
    return found


def ask_driver() -> tuple[list[Gpu], str]:
    """Returns the GPUs that NVIDIA's driver lists, and why it does not answer.

    Empty: no fault is known. A machine without GPUs has none, although nvidia-smi is installed
    there; nor has a driver before 510, which does not know all of `FIELDS`.
    """
    query = ["nvidia-smi", f"--query-gpu={FIELDS}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=ASK_S, check=False)
        if done.returncode == 0:
            return read_driver(done.stdout), ""
    except (OSError, ValueError):
        return [], ""
    except subprocess.TimeoutExpired:
        return [], f"nvidia-smi does not answer within {ASK_S} s"
    said = " ".join(f"{done.stdout}\n{done.stderr}".split())
    if any(words in said.lower() for words in ("no devices", "not a valid field")):
        return [], ""
    return [], said[:200] or f"nvidia-smi ended with {done.returncode}"
