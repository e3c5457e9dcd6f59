"""The device of this rank, and what it can do."""

from __future__ import annotations

import os
import platform

import torch

from runner.devices import BF16_SINCE, FP16_SINCE, gpus_meant, host_memory
from runner.errors import UsageError
from runner.shapes import Device


def find_device(local_rank: int, local_world_size: int) -> tuple[torch.device, Device]:
    """The GPU of this rank if there is one, else its share of the machine's CPU.

    Raises:
        UsageError: this job has GPUs, and torch cannot use them.
    """
    if torch.cuda.is_available():
        # With one GPU visible to each task (Slurm's --gpus-per-task) its number is always 0.
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
    if meant := gpus_meant(os.environ):
        raise UsageError(
            f"{meant} on {platform.node()}, and torch {torch.__version__} cannot use them: {_why_no_gpu()}.",
            "Take a torch for CUDA that this driver runs (stage env check says which), and in a container --nv; to "
            "train on the CPU all the same: export CUDA_VISIBLE_DEVICES= in slurm.setup.",
        )
    # What DeepSpeed asks too (cpu_accelerator.py): few CPUs compute in fp16, and it refuses the others.
    has_fp16 = bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return torch.device("cpu"), Device("cpu", "CPU", host_memory(os.environ) // local_world_size, True, has_fp16)


def _why_no_gpu() -> str:
    """What torch says when it is made to look for one."""
    try:
        torch.cuda.current_device()
    except (AssertionError, RuntimeError) as error:  # AssertionError: a build for CPUs
        return str(error).strip().partition("\n")[0].rstrip(".")
    return "it finds none"


def gpu_uuid(device: torch.device) -> str:
    """What tells a GPU from all others, whatever its number; empty for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def peak_memory(device: torch.device) -> float:
    """The most memory this rank has held so far, GiB: allocated on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
