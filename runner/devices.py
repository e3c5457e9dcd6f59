"""Which device a rank will have, as far as that can be known before one starts and without torch.

On the machine that will train, the driver is asked (`here`); on a login node, what Slurm calls the GPUs of a job
(`of_job`) has to do. Where nothing certain is known the answer is None, and the ranks find out for themselves.
"""

from __future__ import annotations

import importlib.metadata
import math
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from runner.config import SlurmConfig
from runner.errors import human_count
from runner.shapes import Device

GIB = 2**30
# NVIDIA's data sheets: memory of the largest version in GB, compute capability. By the word that is in its name.
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
    "l4": (24, 8.9),
    "l40": (48, 8.9),
    "l40s": (48, 8.9),
    "4090": (24, 8.9),
    "h20": (141, 9.0),
    "h100": (94, 9.0),
    "h800": (94, 9.0),
    "h200": (141, 9.0),
    "b200": (192, 10.0),
}
BF16_SINCE, FP16_SINCE = 8.0, 7.0  # compute capability, as the ranks ask for it
NODE_OF_A_DEVICE = ("dev/nvidia0", "dev/kfd", "dev/dxg", "proc/driver/nvidia/gpus")
ASK_S = 20
GPU_OPTIONS = ("gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket")  # of sbatch; and `gres`


@dataclass(frozen=True)
class NodeShape:
    """CPUs, GPUs and memory (bytes; 0: not told) of one node, as `sinfo` shows them."""

    cpus: int
    gpus: int
    memory: int = 0
    gpu_types: tuple[str, ...] = ()


@dataclass(frozen=True)
class Gpu:
    """A GPU by its name; bytes, and compute capability, None where that is not known."""

    name: str
    memory: int
    capability: float | None


def here(num_local: int, environ: Mapping[str, str], *, own_torch: bool = True) -> Device | None:
    """The device of each of `num_local` ranks on this machine; None where there is one that does not answer.

    Args:
        own_torch: the ranks run what is installed here, so a torch without CUDA means the CPU.
    """
    host = host_memory(environ) // num_local
    cpu = Device("cpu", "CPU", host, True, True)
    if (own_torch and _torch_is_for_cpus()) or hides_all(environ):
        return cpu
    if not any((Path("/") / path).exists() for path in NODE_OF_A_DEVICE):
        return cpu
    visible = visible_of(_ask_driver(), environ.get("CUDA_VISIBLE_DEVICES"))
    return _device(visible[0], host) if visible else None


def of_job(slurm: SlurmConfig, nodes: Sequence[NodeShape], num_local: int) -> Device | None:
    """The best that a job's ranks could get: what does not do there does nowhere. Pure.

    Args:
        nodes: of the partition; empty where Slurm was not to be asked.
        num_local: ranks on a node.
    """
    wanted = max(slurm.gpus_per_node, *_counts_asked(slurm))
    fitting = [node for node in nodes if node.gpus >= wanted]
    host = _memory_asked(slurm) or max((node.memory for node in fitting), default=0)
    types = _types_asked(slurm)
    if not wanted and not types:
        return Device("cpu", "CPU", host // num_local, True, True) if host else None
    named = types or sorted({kind for node in fitting for kind in node.gpu_types})
    gpus = [gpu_named(name) for name in named]
    known = [gpu for gpu in gpus if gpu is not None]
    if not known or len(known) < len(gpus):
        return None
    best = max(known, key=lambda gpu: (gpu.memory, gpu.capability or 0))
    capability = max(gpu.capability or math.inf for gpu in known)
    return _device(Gpu(" or ".join(gpu.name for gpu in known), best.memory, capability), host // num_local)


def gpu_named(name: str) -> Gpu | None:
    """A GPU by a name such as `a800`, `tesla_v100` or `NVIDIA A100-SXM4-40GB`; None: nobody knows it. Pure."""
    words = [word.removeprefix("rtx") for word in re.findall(r"[a-z]*\d+[a-z]*", name.lower())]
    kind = next((word for word in words if word in KINDS), None)
    if kind is None:
        return None
    size = next((int(word[:-2]) for word in words if re.fullmatch(r"\d+gb", word)), KINDS[kind][0])
    return Gpu(name, size * GIB, KINDS[kind][1])


def visible_of(gpus: Sequence[Gpu], visible: str | None) -> list[Gpu]:
    """Those that CUDA_VISIBLE_DEVICES leaves: up to the first that is none. Named by anything but numbers: all. Pure.

    Source: CUDA C++ Programming Guide, "CUDA Environment Variables".
    """
    if visible is None or visible.startswith(("GPU-", "MIG-")):
        return list(gpus)
    words = [word.strip() for word in visible.split(",")]
    named = takewhile(lambda word: word.isdigit() and int(word) < len(gpus), words)
    return [gpus[int(word)] for word in named]


def hides_all(environ: Mapping[str, str]) -> bool:
    """Whether CUDA_VISIBLE_DEVICES leaves no GPU: nothing in it, or nothing to begin with that is one."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    return visible is not None and not re.match(r"\s*(\d|GPU-|MIG-)", visible)


def gpus_meant(environ: Mapping[str, str]) -> str:
    """In words, that Slurm has given GPUs to this step on this node; empty where it has not, or they are hidden."""
    count = environ.get("SLURM_GPUS_ON_NODE", "")
    if hides_all(environ) or not count.isdigit() or not int(count):
        return ""
    return f"Slurm has given this job {human_count(int(count), 'GPU')}"


def read_driver(text: str) -> list[Gpu]:
    """`nvidia-smi --query-gpu=name,memory.total[,compute_cap] --format=csv,noheader,nounits`, a GPU a line. Pure."""
    found = []
    for line in text.splitlines():
        name, memory, *capability = [word.strip() for word in line.split(",")]
        by_name = gpu_named(name)
        told = float(capability[0]) if capability else by_name.capability if by_name else None
        found.append(Gpu(name, int(memory) * 2**20, told))
    return found


def host_memory(environ: Mapping[str, str]) -> int:
    """Bytes of this node's memory that the processes of this job may have: of the machine, its cgroup, or Slurm."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([machine, *_limits_of_cgroups(), *_limits_of_slurm(environ)])


def _device(gpu: Gpu, host: int) -> Device:
    # What is not known is not held against it.
    capability = gpu.capability if gpu.capability is not None else math.inf
    return Device("cuda", gpu.name, gpu.memory, capability >= BF16_SINCE, capability >= FP16_SINCE, host_memory=host)


def _torch_is_for_cpus() -> bool:
    try:
        return importlib.metadata.version("torch").endswith("+cpu")
    except importlib.metadata.PackageNotFoundError:
        return False


def _ask_driver() -> list[Gpu]:
    """The GPUs that the driver tells of; empty where it does not answer. Drivers before 510 know no compute_cap."""
    for query in ("name,memory.total,compute_cap", "name,memory.total"):
        command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_S, check=False)
            if done.returncode == 0:
                return read_driver(done.stdout)
        except (OSError, ValueError, subprocess.TimeoutExpired):
            return []
    return []


def _types_asked(slurm: SlurmConfig) -> list[str]:
    """The types of GPU in `slurm.options`: `gres: gpu:a800:4`, `gpus-per-node: a800:4`, `constraint: a100`."""
    types = [entry[0] for entry in _gpus_asked(slurm) if entry and not entry[0].isdigit()]
    if not types:
        words = re.findall(r"[\w-]+", str(slurm.options.get("constraint", "")))
        types = [word for word in words if gpu_named(word)]
    return types


def _counts_asked(slurm: SlurmConfig) -> list[int]:
    """How many GPUs a node must have for each way in which `slurm.options` asks for some; 0: for none.

    `gpus` is of the whole job, others of a task or a socket: a node has at least one.
    """
    counts = [int(entry[-1]) if entry and entry[-1].isdigit() else 1 for entry in _gpus_asked(slurm)]
    per_node = slurm.options.keys().isdisjoint({"gpus", "gpus-per-task", "gpus-per-socket"})
    return [0, *(count if per_node else min(count, 1) for count in counts)]


def _gpus_asked(slurm: SlurmConfig) -> list[list[str]]:
    """The words between colons of each request for GPUs: `gpu:a800:4` in `gres` is `["a800", "4"]`, `gpu` is `[]`."""
    options = {name: str(value) for name, value in slurm.options.items()}
    entries = [e.split(":")[1:] for e in options.get("gres", "").split(",") if e.split(":")[0] == "gpu"]
    return entries + [options[name].split(":") for name in GPU_OPTIONS if name in options]


def _memory_asked(slurm: SlurmConfig) -> int:
    """Bytes of `slurm.options.mem`; 0: not asked for, or all of the node."""
    match = re.fullmatch(r"(\d+)([KMGT]?)B?", str(slurm.options.get("mem", "")), re.IGNORECASE)
    return int(match[1]) * 1024 ** ("KMGT".index(match[2].upper() or "M") + 1) if match else 0


def _limits_of_slurm(environ: Mapping[str, str]) -> list[int]:
    """What Slurm gives a job on each node (MB; 0 is all of it)."""
    total, each = environ.get("SLURM_MEM_PER_NODE", ""), environ.get("SLURM_MEM_PER_CPU", "")
    cpus = environ.get("SLURM_CPUS_ON_NODE", "")
    if total.isdigit() and int(total):
        return [int(total) * 2**20]
    return [int(each) * int(cpus) * 2**20] if each.isdigit() and cpus.isdigit() and int(each) else []


def _limits_of_cgroups() -> list[int]:
    """The memory limits above this process (v2: `memory.max`, v1: `memory.limit_in_bytes`); none elsewhere."""
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
