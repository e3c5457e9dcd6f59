"""NVIDIA's and AMD's GPUs by their names, and what the driver of this machine says of them."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

GIB = 2**30


# Words of the GPU's name (more words count more) -> memory of its largest version in GB, compute
# capability, and FLOP/s of one device as torch sees it: in 16 bits on tensor or matrix cores with
# fp32 accumulation, and in fp32 without TF32 (AMD: on matrix cores); 0: not known. Dense: data
# sheets print numbers with 2:4 sparsity, which are twice as high. torch for ROCm gives the version
# of the architecture (gfx90a: 9.0, gfx942: 9.4) as capability, and sees each of the two dies (GCD)
# of an MI250 or MI250X as a device: half of the card.
# Sources: the data sheet of each by NVIDIA and AMD; for GeForce and RTX Ada the architecture white
# papers ("GA102", "Ada", appendix), for TITAN RTX the Turing one; GB200 is a 72nd part of an NVL72.
KINDS: dict[str, tuple[int, float, float, float]] = {
    "k80": (12, 3.7, 0, 0),
    "p100": (16, 6.0, 0, 0),
    "p40": (24, 6.1, 0, 0),
    "v100 pcie": (32, 7.0, 112e12, 14e12),
    "v100s": (32, 7.0, 130e12, 16.4e12),
    "v100": (32, 7.0, 125e12, 15.7e12),
    "t4": (16, 7.5, 65e12, 8.1e12),
    "2080ti": (11, 7.5, 0, 0),
    "titan rtx": (24, 7.5, 130e12, 16.3e12),
    "a100": (80, 8.0, 312e12, 19.5e12),
    "a800": (80, 8.0, 312e12, 19.5e12),
    "a30": (24, 8.0, 165e12, 10.3e12),
    "a10": (24, 8.6, 125e12, 31.2e12),
    "a10g": (24, 8.6, 70e12, 35e12),
    "a40": (48, 8.6, 149.7e12, 37.4e12),
    "a6000": (48, 8.6, 154.8e12, 38.7e12),
    "3090": (24, 8.6, 71e12, 35.6e12),
    "6000 ada": (48, 8.9, 364.2e12, 91.1e12),
    "l4": (24, 8.9, 121e12, 30.3e12),
    "l40": (48, 8.9, 181e12, 90.5e12),
    "l40s": (48, 8.9, 362e12, 91.6e12),
    "4090": (24, 8.9, 165e12, 82.6e12),
    "h20": (141, 9.0, 148e12, 44e12),
    "h100 pcie": (80, 9.0, 756e12, 51e12),
    "h100 nvl": (94, 9.0, 835e12, 60e12),
    "h100": (94, 9.0, 989e12, 67e12),
    "h800 pcie": (80, 9.0, 756e12, 51e12),
    "h800": (94, 9.0, 989e12, 67e12),
    "h200 nvl": (141, 9.0, 835e12, 60e12),
    "h200": (141, 9.0, 989e12, 67e12),
    "gh200": (144, 9.0, 989e12, 67e12),
    "b200": (192, 10.0, 2250e12, 75e12),
    "gb200": (192, 10.0, 2500e12, 80e12),
    "mi210": (64, 9.0, 181e12, 45.3e12),
    "mi250x": (64, 9.0, 191.5e12, 47.9e12),
    "mi250": (64, 9.0, 181e12, 45.3e12),
    "mi300a": (128, 9.4, 980.6e12, 122.6e12),
    "mi300x": (192, 9.4, 1307e12, 163.4e12),
    "mi325x": (256, 9.4, 1307e12, 163.4e12),
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
    words = _words(name)
    kind = _kind_of(words)
    if kind is None:
        profile = re.search(r"\d+g\.(\d+)gb", name.lower())
        return Gpu(name, int(profile[1]) * GIB, BF16_SINCE) if profile else None
    size = next((int(word[:-2]) for word in words if re.fullmatch(r"\d+gb", word)), kind[0])
    return Gpu(name, size * GIB, kind[1])


def peak_flops(name: str, precision: str) -> float | None:
    """FLOP/s of a device in `precision` (bf16, fp16, tf32, fp32); None where it is not known.

    MFU is measured against it.
    """
    _, _, low, full = _kind_of(_words(name)) or (0, 0, 0, 0)
    # TF32 is half as fast as 16 bits where there is any (data sheets); MI200s have none.
    tf32 = full if "mi2" in name.lower() else low / 2
    return {"fp32": full, "tf32": tf32}.get(precision, low) or None


def _words(name: str) -> list[str]:
    """The words of a GPU's name: `rtx6000ada` has two, without `rtx`."""
    apart = re.sub(r"(6000)[ _-]*(ada)", r"\1 \2", name.lower())
    return [
        word if word == "rtx" else word.removeprefix("rtx")
        for word in re.findall(r"[a-z0-9]+", apart)
    ]


def _kind_of(words: Sequence[str]) -> tuple[int, float, float, float] | None:
    known = [kind for kind in KINDS if set(kind.split()) <= set(words)]
    return KINDS[max(known, key=lambda kind: kind.count(" "))] if known else None


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
