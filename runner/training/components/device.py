"""The device of this rank, its abilities and its faster kernels; signals that ask the run to stop.

The kernels compute the same formulas; each is printed. `AIRLIFT_KERNELS=reference` in the
environment keeps those of transformers and the defaults of torch. A setting that the user has made
in the environment is never changed.

Saving inside a signal handler often fails, and one rank that leaves alone makes the others hang. So
the handler only notes the signal, and the loop asks all ranks together at the next step.
"""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Mapping, MutableMapping
from types import FrameType

import torch
from torch import nn

from runner.config.job_config import SlurmConfig
from runner.job.devices import (
    BF16_SINCE,
    FP16_SINCE,
    accelerators_meant,
    broken,
    unusable,
    unused_gpus,
)
from runner.job.host_memory import host_memory
from runner.job.shapes import Device
from runner.training.patches import change_allocator

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def find_device(
    local_rank: int, local_world_size: int, slurm: SlurmConfig
) -> tuple[torch.device, Device]:
    """The GPU of this rank if there is one, otherwise its share of the machine's CPU.

    Args:
        local_rank: this rank's number on its node.
        local_world_size: the number of ranks on the node.
        slurm: what the run file requests of Slurm; it counts inside a job.

    Returns:
        The device for torch, and its abilities for the plan.

    Raises:
        UsageError: accelerators were requested or are here, and torch cannot use them. A torch for
            CPUs alone uses the CPU; the launcher prints that.
    """
    if torch.cuda.is_available():
        # Where each task sees one GPU (Slurm's --gpus-per-task), its number is always 0.
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        properties = torch.cuda.get_device_properties(device)
        return device, Device(
            "cuda",
            properties.name,
            properties.total_memory,
            has_bf16=properties.major >= BF16_SINCE,
            has_fp16=properties.major >= FP16_SINCE,
            host_memory=host_memory(os.environ) // local_world_size,
        )
    if meant := accelerators_meant(slurm, os.environ):
        raise unusable(meant, f"torch {torch.__version__}: {_why_no_gpu()}")
    is_for_gpus = torch.version.cuda is not None or torch.version.hip is not None
    if is_for_gpus and (there := unused_gpus(os.environ, rocm=torch.version.hip is not None)):
        raise broken(f"{there}; torch {torch.__version__}: {_why_no_gpu()}")
    return torch.device("cpu"), Device.cpu(host_memory(os.environ) // local_world_size)


def _why_no_gpu() -> str:
    """torch's own message about why it has no GPU."""
    try:
        torch.cuda.current_device()
    except (AssertionError, RuntimeError) as error:  # AssertionError: a build for CPUs
        return str(error).strip().partition("\n")[0].rstrip(".")
    return "it finds none"


def gpu_uuid(device: torch.device) -> str:
    """The UUID of a GPU; empty for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def peak_memory(device: torch.device) -> float:
    """The most memory of this rank so far, GiB: allocated on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def dropout_seed(run: int, step: int, rank: int) -> int:
    """The seed of a rank's dropout in a step: the first 63 bits of sha256 of `RUN STEP RANK`.

    Python's own `hash` may change with any version of Python, and with it the losses of a run.

    Args:
        run: the run file's `seed`.
    """
    digest = hashlib.sha256(f"{run} {step} {rank}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def seed(number: int, device: torch.device) -> None:
    """Seeds the random numbers of the CPU and of this rank's GPU.

    `torch.manual_seed` does the same for each kind of device; for those that are not there it notes
    a stack trace each time, which takes half a millisecond.
    """
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":
        torch.cuda.manual_seed(number)


# SIGTERM is of Slurm. Our launcher passes on SIGUSR1: on SIGTERM srun would kill the ranks.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopRequest:
    """Remembers the first stop signal."""

    def __init__(self) -> None:
        self.received: str | None = None

    def listen(self) -> None:
        """From now on stop signals are noted and do not end the process."""
        for number in STOP_SIGNALS:
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or signal.Signals(number).name


SWITCH = "AIRLIFT_KERNELS"
OFF = f"{SWITCH}=reference turns it off"
TF32_VARIABLES = ("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE")
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def wants_reference(environ: Mapping[str, str]) -> bool:
    """Whether the user wants the reference kernels."""
    return environ.get(SWITCH) == "reference"


def use_tanh_gelu(model: nn.Module, environ: Mapping[str, str] = os.environ) -> str:
    """Replaces transformers' `gelu_new` and `gelu_fast` by torch's tanh GELU, in place.

    It is the same formula (arXiv:1606.08415, 2) in one kernel instead of eight, which reads and
    writes three times less memory. Values differ by rounding: 5e-7 in float32. The model's
    config.json keeps the name of its activation.

    Returns:
        What was done, for printing; empty if nothing was.
    """
    from transformers.activations import FastGELUActivation, NewGELUActivation

    if wants_reference(environ):
        return ""
    replaced = 0
    for module in model.modules():
        for name, child in module.named_children():
            if isinstance(child, (NewGELUActivation, FastGELUActivation)):
                setattr(module, name, nn.GELU(approximate="tanh"))
                replaced += 1
    return f"GELU by torch's tanh kernel: same formula, one pass ({OFF})" if replaced else ""


def tune(
    device: torch.device, *, images: bool, environ: MutableMapping[str, str] = os.environ
) -> tuple[str, ...]:
    """Sets what makes torch faster on NVIDIA GPUs. Does nothing on other devices.

    Args:
        device: of this rank.
        images: whether the run reads images.
        environ: where users make settings of their own.

    Returns:
        What was set and why, for printing.
    """
    if device.type != "cuda":
        return ()
    if wants_reference(environ):
        return (f"kernels: torch's defaults ({SWITCH}=reference)",)
    notes = [_allow_tf32(environ), _expand_segments(environ)]
    if images:
        torch.backends.cudnn.benchmark = True
        notes.append(
            "cudnn.benchmark: on, images in channels_last: all batches have one shape, and tensor "
            f"cores want the channels last ({OFF})"
        )
    return tuple(notes)


def uses_tf32(environ: Mapping[str, str]) -> bool:
    """Whether float32 products are made in TF32 on a GPU that can (Ampere and later)."""
    if theirs := [environ[name] for name in TF32_VARIABLES if name in environ]:
        return theirs[0] == "1"
    return not wants_reference(environ)


def _allow_tf32(environ: Mapping[str, str]) -> str:
    if theirs := next((name for name in TF32_VARIABLES if name in environ), None):
        return f"TF32: as {theirs}={environ[theirs]} says"
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    return (
        "TF32: on: float32 products on tensor cores, with 10 bits of mantissa "
        f"(NVIDIA_TF32_OVERRIDE=0 or {OFF})"
    )


def _expand_segments(environ: MutableMapping[str, str]) -> str:
    if theirs := next((name for name in ALLOCATOR_VARIABLES if name in environ), None):
        return f"CUDA allocator: as {theirs}={environ[theirs]} says"
    setting = "expandable_segments:True"
    environ[ALLOCATOR_VARIABLES[1]] = setting  # for child processes
    if not change_allocator(setting):
        return "CUDA allocator: torch's own setting"
    return (
        f"CUDA allocator: {setting}: batches of many lengths fragment its memory otherwise "
        f"({ALLOCATOR_VARIABLES[1]}=expandable_segments:False or {OFF})"
    )
