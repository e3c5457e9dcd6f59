"""The device of this rank and its abilities; signals that ask the run to stop.

Saving inside a signal handler often fails, and one rank that leaves alone makes the others hang. So
the handler only notes the signal, and the loop asks all ranks together at the next step.
"""

from __future__ import annotations

import hashlib
import os
import signal
from types import FrameType

import torch

from runner.config.run_config import SlurmConfig
from runner.job.devices import accelerators_meant, broken, unusable, unused_gpus
from runner.job.gpus import BF16_SINCE, FP16_SINCE
from runner.job.host_memory import host_memory
from runner.job.shapes import Device

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
        has_bf16 = properties.major >= BF16_SINCE
        return device, Device(
            "cuda",
            properties.name,
            properties.total_memory,
            has_bf16,
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
