"""Predicts which device each rank will have, before a rank starts and without torch.

`KINDS` is the table of NVIDIA's and AMD's GPUs by their names.

On the machine that will train, `here` asks the driver. On a login node, `of_job` uses the names
that Slurm has for the GPUs of a job. The answer is None where nothing certain is known. Then the
ranks find out.
"""

from __future__ import annotations

import importlib.metadata
import math
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path

from runner.config.job_config import JobConfig, SlurmConfig
from runner.config.run_config import RunConfig
from runner.from_stage import UsageError, human_count
from runner.inputs.clusters import gpus_of
from runner.job.host_memory import host_memory
from runner.job.partition import NodeShape, Partition
from runner.job.plan import precision_on
from runner.job.shapes import Device
from runner.slurm.environment import OF_GPUS
from runner.slurm.script import GPU_OPTIONS

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
# Seconds. Without persistence mode nvidia-smi first starts the driver, which takes seconds for each
# GPU; with a broken driver it never ends.
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
    kind = _numbers_of(words)
    if kind is None:
        profile = re.search(r"\d+g\.(\d+)gb", name.lower())
        return Gpu(name, int(profile[1]) * GIB, BF16_SINCE) if profile else None
    size = next((int(word[:-2]) for word in words if re.fullmatch(r"\d+gb", word)), kind[0])
    return Gpu(name, size * GIB, kind[1])


def peak_flops(name: str, precision: str) -> float | None:
    """FLOP/s of a device in `precision` (bf16, fp16, tf32, fp32); None where it is not known.

    MFU is measured against it.
    """
    _, _, low, full = _numbers_of(_words(name)) or (0, 0, 0, 0)
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


def _numbers_of(words: Sequence[str]) -> tuple[int, float, float, float] | None:
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


NODES_OF_NVIDIA, NODES_OF_AMD = ("dev/nvidia0", "dev/dxg"), ("dev/kfd",)
# For each kind of accelerator: its names in Slurm's gres, the variables that schedulers set, its
# device nodes. torch reaches only GPUs: NVIDIA's as CUDA devices, and those of ROCm and of Hygon's
# DTK where it was built for them. The others (Ascend, Cambricon, Gaudi, Intel, TPU) are known by
# name alone, so that a run that asks for one is refused and not trained on the CPU.
OTHER = "accelerator of this kind"
ACCELERATORS: dict[str, tuple[frozenset[str], tuple[str, ...], tuple[str, ...]]] = {
    "GPU": (
        frozenset({"gpu", "dcu", "hip", "rocm"}),
        ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"),
        ("dev/nvidia0", "dev/nvidiactl", "dev/kfd", "dev/dxg", "proc/driver/nvidia/gpus"),
    ),
    OTHER: (
        frozenset({"npu", "ascend", "huawei", "mlu", "hpu", "gaudi", "xpu", "tpu"}),
        (
            *("ASCEND_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES", "NPU_VISIBLE_DEVICES"),
            *("MLU_VISIBLE_DEVICES", "HABANA_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"),
            "TPU_VISIBLE_CHIPS",
        ),
        ("dev/davinci0", "dev/davinci_manager", "dev/cambricon_dev0", "dev/hl0"),
    ),
}
USABLE = (
    "Training here runs on GPUs that torch sees as CUDA devices "
    "(NVIDIA; AMD and Hygon with their torch), or on CPUs"
)
TO_THE_CPU = (
    "To train on the CPU all the same: export CUDA_VISIBLE_DEVICES= (for a job: one line more in "
    "slurm.setup, or in `setup:` of clusters.yaml where the run file has no slurm.setup)."
)


def here(num_local: int, environ: Mapping[str, str], *, own_torch: bool = True) -> Device | None:
    """Returns the device of each rank on this machine.

    Args:
        num_local: number of ranks on this machine.
        environ: environment variables of the ranks.
        own_torch: whether the ranks use the torch of this environment. If so, a torch without CUDA
            means the CPU.

    Returns:
        The device; None: there is a GPU, but the driver does not answer, or it is a slice (MIG).
    """
    host = host_memory(environ) // num_local
    if (own_torch and _torch_for_cpus()) or hides_all(environ) or not _is_here("GPU"):
        return Device.cpu(host)
    visible = visible_of(ask_driver()[0], environ.get("CUDA_VISIBLE_DEVICES"))
    return _device(visible[0], host) if visible and visible[0].memory else None


def notes(
    slurm: SlurmConfig, num_local: int, environ: Mapping[str, str], *, own_torch: bool = True
) -> list[str]:
    """Describes the accelerators of this node for the user, before ranks start.

    Args:
        slurm: what the run file requests from Slurm.
        num_local: number of ranks on this node.
        environ: environment variables of the ranks.
        own_torch: as for `here`.

    Returns:
        One line per fact that the user should know.

    Raises:
        UsageError: accelerators were requested, or this machine's driver is broken, and the ranks
            cannot use them.
    """
    asked = _asked_in_job(slurm, environ)
    meant = _given(environ) or asked
    if hides_all(environ):
        what = f"{meant}, and CUDA_VISIBLE_DEVICES hides them: training is on the CPU"
        return [what] if meant else []
    torch, has_gpu = _torch_for_cpus() if own_torch else "", _is_here("GPU")
    if meant and torch:
        raise unusable(meant, f"torch {torch} is for CPUs only")
    is_other = outside_jobs(environ) and _is_here(OTHER)
    if (is_other or _is_set(ACCELERATORS[OTHER][1], environ)) and not has_gpu:
        raise unusable(meant, f"torch does not see an {OTHER} as a CUDA device")
    if meant and not has_gpu:
        raise unusable(meant, "this node has no device of a GPU (/dev/nvidia0, /dev/kfd)")
    if torch and has_gpu:
        return [f"this node has GPUs, which are not used: torch {torch} is for CPUs only"]
    gpus, fault = ask_driver() if has_gpu or outside_jobs(environ) else ([], "")
    if not torch and outside_jobs(environ) and fault:
        raise broken(fault)
    number = len(visible_of(gpus, environ.get("CUDA_VISIBLE_DEVICES"))) if has_gpu else 0
    number = _number_given(environ) or number
    lines = []
    if number > num_local and "SLURM_JOB_ID" not in environ:  # in a job, the launcher prints it
        lines.append(_idle(number, num_local, "are here"))
    if asked and number and number != slurm.gpus_per_node > 0:
        lines.append(f"{asked}; this node has {number}")
    return lines


def _idle(gpus: int, ranks: int, where: str) -> str:
    return (
        f"{human_count(gpus, 'GPU')} {where} and {human_count(ranks, 'rank')} on each node: "
        f"{gpus - ranks} stay idle "
        f"(one machine: --processes {gpus}; a job: slurm.tasks_per_node: {gpus})"
    )


def unusable(meant: str, why: str) -> UsageError:
    """Returns the error for an accelerator that was requested and cannot be used.

    Training on the CPU instead would be silent and slow, so it is refused.

    Args:
        meant: a text that says who requested the accelerator.
        why: the reason why the ranks cannot use it.
    """
    return UsageError(
        f"{meant or 'an accelerator is there'} on {platform.node()}, and the ranks cannot use it: "
        f"{why}.",
        f"{USABLE}: take a torch for this device and its driver (stage env check says which), "
        f"and in a container --nv. {TO_THE_CPU}",
    )


def broken(fault: str) -> UsageError:
    """Returns the error for GPUs of this machine that cannot be used, although nobody asked for
    them by name. Training on the CPU instead would be silent and slow.

    Args:
        fault: what the driver or torch says.
    """
    return UsageError(
        f"{platform.node()} has a GPU, and it cannot be used: {fault.rstrip('.')}.",
        "Look at `nvidia-smi`; after an update of the driver, restart the machine; torch may also "
        f"need a newer driver (stage env check), and a container --nv. {TO_THE_CPU}",
    )


def outside_jobs(environ: Mapping[str, str]) -> bool:
    """Whether all devices of this machine are ours: a job of Slurm may have none of its node's."""
    return "SLURM_JOB_ID" not in environ and not hides_all(environ)


def unused_gpus(environ: Mapping[str, str], *, rocm: bool) -> str:
    """Why this machine, where torch finds no GPU, has one all the same; empty: it has none.

    Args:
        environ: environment variables of the rank.
        rocm: torch is built for AMD's GPUs, not for NVIDIA's.
    """
    if not outside_jobs(environ):
        return ""
    if not rocm:
        gpus, fault = ask_driver()
        if fault or gpus:
            return fault or f"nvidia-smi lists {human_count(len(gpus), 'GPU')}"
    there = [Path("/", path) for path in (NODES_OF_AMD if rocm else NODES_OF_NVIDIA)]
    return next((f"{path} is there" for path in there if _may_use(path)), "")


def _may_use(path: Path) -> bool:
    """Whether a device exists and no scheduler has closed it for this process."""
    try:
        os.close(os.open(path, os.O_RDWR))
    except (FileNotFoundError, PermissionError):
        return False
    except OSError:  # the driver's own fault
        return True
    return True


def accelerators_meant(slurm: SlurmConfig, environ: Mapping[str, str]) -> str:
    """Describes who requested accelerators here.

    Returns:
        A text; empty: nobody did, or CUDA_VISIBLE_DEVICES hides them all.
    """
    return "" if hides_all(environ) else _given(environ) or _asked_in_job(slurm, environ)


def _given(environ: Mapping[str, str]) -> str:
    if count := _number_given(environ):
        return f"Slurm has given this job {human_count(count, 'GPU')}"
    variables = (name for _, names, _ in ACCELERATORS.values() for name in names)
    named = next((name for name in variables if _is_set((name,), environ)), None)
    return f"{named}={environ[named]} names an accelerator" if named else ""


def _number_given(environ: Mapping[str, str]) -> int:
    count = environ.get("SLURM_GPUS_ON_NODE", "")
    return int(count) if count.isdigit() else 0


def _asked_in_job(slurm: SlurmConfig, environ: Mapping[str, str]) -> str:
    """Describes what the run file requests from Slurm; empty outside a job."""
    if "SLURM_JOB_ID" not in environ:
        return ""
    if slurm.gpus_per_node:
        gpus = human_count(slurm.gpus_per_node, "GPU")
        return f"the run file asks for {gpus} per node (slurm.gpus_per_node)"
    names = [f"gres: {entry[0]}" for entry in _gres(slurm) if _kind_of(entry[0])]
    names += [name for name in GPU_OPTIONS if name in slurm.options]
    return f"the run file asks for accelerators (slurm.options {names[0]})" if names else ""


def _gres(slurm: SlurmConfig) -> list[list[str]]:
    """Splits `gres` at its colons: `gpu:a800:4,gres/npu:8` is `[[gpu, a800, 4], [npu, 8]]`."""
    entries = str(slurm.options.get("gres", "")).lower().split(",")
    return [entry.strip().removeprefix("gres/").split(":") for entry in entries if entry.strip()]


def _kind_of(gres: str) -> str:
    """Returns the kind of accelerator for a name in Slurm's gres; empty: no known accelerator."""
    return next((kind for kind, (names, _, _) in ACCELERATORS.items() if gres in names), "")


def _is_set(names: Sequence[str], environ: Mapping[str, str]) -> bool:
    return any(
        re.match(r"\s*(\d|all\b|\w+-)", environ.get(name, ""), re.IGNORECASE) for name in names
    )


def _is_here(kind: str) -> bool:
    return any(Path("/", path).exists() for path in ACCELERATORS[kind][2])


def notes_of_job(slurm: SlurmConfig, ranks: int) -> list[str]:
    """Describes, for the user, the accelerators that a job will request.

    Args:
        slurm: what the run file requests from Slurm.
        ranks: number of ranks per node.

    Returns:
        One line per fact that the user should know.

    Raises:
        UsageError: the job requests accelerators that no rank can use.
    """
    for name, *_ in _gres(slurm):
        if _kind_of(name) == OTHER:
            raise UsageError(
                f"slurm.options gres: {name}: an {OTHER} cannot be used.",
                f"{USABLE}. Ask for those: slurm.gpus_per_node, or slurm.options gres gpu:TYPE:N; "
                "or remove the gres to train on CPUs.",
            )
    gpus, in_options, per_node = _most_asked(slurm), _counts_asked(slurm), _is_per_node(slurm)
    equal = slurm.gpus_per_node in (max(in_options), sum(in_options))
    if per_node and slurm.gpus_per_node and any(in_options) and not equal:
        raise UsageError(
            f"slurm.gpus_per_node: {slurm.gpus_per_node}, and slurm.options asks for "
            f"{human_count(sum(in_options), 'GPU')} of a node, which is what the job would get.",
            "Make them equal, or remove one of them.",
        )
    if per_node and 0 < gpus < ranks and not _on_cpus(slurm):
        raise UsageError(
            f"slurm.tasks_per_node: {ranks} ranks on each node, and "
            f"{human_count(gpus, 'GPU')} asked for there: two ranks cannot share one.",
            f"Set slurm.tasks_per_node: {gpus} (or omit it), or slurm.gpus_per_node: {ranks}.",
        )
    return [_idle(gpus, ranks, "are asked for")] if per_node and gpus > ranks else []


def leaves_gpus(config: JobConfig, partition: Partition, environ: Mapping[str, str]) -> int:
    """Returns the GPUs that each node of a job has and nobody asks for, by oversight.

    Args:
        config: the run file; `gpus_per_node: 0` in it is meant so.
        partition: the one of the job.
        environ: the variables of this shell, which sbatch reads.
    """
    slurm, least = config.slurm, min((node.gpus for node in partition.nodes), default=0)
    is_meant = "slurm.gpus_per_node" in config.given or _on_cpus(slurm) or asks_for_gpus(slurm)
    if not least or is_meant or any(f"SBATCH_{name}" in environ for name in OF_GPUS):
        return 0
    gets_all = "exclusive" in slurm.options or partition.gives_whole_nodes
    return 0 if gets_all else least


def torch_without_gpus(slurm: SlurmConfig) -> str:
    """Returns the version of the installed torch if the job asks for GPUs that it cannot use.

    Args:
        slurm: what the run file requests from Slurm.
    """
    return _torch_for_cpus() if asks_for_gpus(slurm) else ""


def of_job(
    slurm: SlurmConfig, nodes: Sequence[NodeShape], num_local: int, memory: int = 0, why: str = ""
) -> Device | None:
    """Returns the best device that the ranks of a job could get. Pure.

    A run that does not fit on the best device fits on no device of the job.

    Args:
        slurm: what the run file requests from Slurm.
        nodes: the nodes of the partition; empty where Slurm could not be asked.
        num_local: number of ranks per node.
        memory: bytes that the job gets of each node; 0: all of them.
        why: it gets no more.

    Returns:
        The device; None: not known.
    """
    wanted = _most_asked(slurm)
    fitting = [node for node in nodes if node.gpus >= wanted]
    host = memory or max((node.memory for node in fitting), default=0)
    if not asks_for_gpus(slurm):
        return replace(Device.cpu(host // num_local), limit=why) if host else None
    known = gpus_of_job(slurm, fitting)
    if not known:
        return None
    best = max(known, key=lambda gpu: (gpu.memory, gpu.capability or 0))
    capability = max(gpu.capability or math.inf for gpu in known)
    named = Gpu(" or ".join(gpu.name for gpu in known), best.memory, capability)
    return replace(_device(named, host // num_local), limit=why)


def check_precision_on(config: RunConfig, profiles: Iterable[Path]) -> None:
    """Refuses a precision that no GPU has of the nodes that profiles describe.

    Raises:
        UsageError: as where Slurm names the GPUs.
    """
    known = gpus_of(profiles)
    if known and asks_for_gpus(config.slurm) and not _on_cpus(config.slurm):
        name, capability = max(known, key=lambda gpu: gpu[1])
        precision_on(config, _device(Gpu(name, 0, capability), 0))


def _on_cpus(slurm: SlurmConfig) -> bool:
    """Whether `slurm.setup` hides all GPUs."""
    given = [re.search(r"\bCUDA_VISIBLE_DEVICES=(\S*)", line) for line in slurm.setup]
    values = [match[1].strip("'\"") for match in given if match]
    return bool(values) and hides_all({"CUDA_VISIBLE_DEVICES": values[-1]})


def asks_for_gpus(slurm: SlurmConfig) -> bool:
    """Whether a job requests GPUs, by `gpus_per_node` or in `slurm.options`."""
    return bool(_most_asked(slurm) or _types_asked(slurm))


def gpus_of_job(slurm: SlurmConfig, nodes: Sequence[NodeShape]) -> list[Gpu]:
    """Returns the kinds of GPU that a job could get; empty: not known. Pure.

    Args:
        nodes: the nodes of the partition.
    """
    named = _types_asked(slurm) or sorted({kind for node in nodes for kind in node.gpu_types})
    gpus = [gpu_named(name) for name in named]
    return [gpu for gpu in gpus if gpu is not None] if None not in gpus else []


def _device(gpu: Gpu, host: int) -> Device:
    # An unknown capability must not refuse a run that could work.
    capability = gpu.capability if gpu.capability is not None else math.inf
    return Device(
        "cuda",
        gpu.name,
        gpu.memory,
        capability >= BF16_SINCE,
        capability >= FP16_SINCE,
        host_memory=host,
    )


def _torch_for_cpus() -> str:
    """Returns the version of the installed torch if it is a build for CPUs; else empty.

    conda's build has no `+cpu` in its version; torch/version.py says it of every build.
    """
    try:
        torch = importlib.metadata.distribution("torch")
    except importlib.metadata.PackageNotFoundError:
        return ""
    try:
        text = Path(str(torch.locate_file("torch/version.py"))).read_text(encoding="utf-8")
    except OSError:
        text = ""
    says_none = [
        re.search(rf"^{name}\b[^=\n]*=\s*None\s*$", text, re.M) for name in ("cuda", "hip")
    ]
    return torch.version if torch.version.endswith("+cpu") or all(says_none) else ""


def _types_asked(slurm: SlurmConfig) -> list[str]:
    """Returns the types of GPU in `slurm.options`.

    Examples: `gres: gpu:a800:4`, `gpus-per-node: a800:4`, `constraint: a100`.
    """
    types = [entry[0] for entry in _gpus_asked(slurm) if entry and not entry[0].isdigit()]
    if not types:
        features = re.findall(r"[\w-]+", str(slurm.options.get("constraint", "")))
        types = [feature for feature in features if gpu_named(feature)]
    return types


def gpus_on_node(slurm: SlurmConfig) -> int | None:
    """Returns how many GPUs a job gets on each node; None: not known before it starts."""
    return _most_asked(slurm) if _is_per_node(slurm) else None


def _most_asked(slurm: SlurmConfig) -> int:
    return max(slurm.gpus_per_node, *_counts_asked(slurm))


def _is_per_node(slurm: SlurmConfig) -> bool:
    return slurm.options.keys().isdisjoint({"gpus", "gpus-per-task", "gpus-per-socket"})


def _counts_asked(slurm: SlurmConfig) -> list[int]:
    """Returns, for each request in `slurm.options`, how many GPUs a node must have; 0: no request.

    `gpus` counts for the whole job, other options count per task or socket. For those, a node has
    at least one.
    """
    counts = [
        int(entry[-1]) if entry and entry[-1].isdigit() else 1 for entry in _gpus_asked(slurm)
    ]
    return [0, *(count if _is_per_node(slurm) else min(count, 1) for count in counts)]


def _gpus_asked(slurm: SlurmConfig) -> list[list[str]]:
    """Splits each request for GPUs at colons: `gpu:a800:4` in `gres` is `["a800", "4"]`."""
    # A gres name other than `gpu` (`dcu`) stays in the entry: it counts as an unknown type.
    entries = [
        entry[1:] if entry[0] == "gpu" else entry
        for entry in _gres(slurm)
        if _kind_of(entry[0]) == "GPU"
    ]
    options = [str(slurm.options[name]) for name in GPU_OPTIONS if name in slurm.options]
    return entries + [option.split(":") for option in options]
