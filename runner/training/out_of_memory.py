"""A device without enough memory, explained: what was asked for, what there is, what would fit."""

from __future__ import annotations

import re
from dataclasses import replace

import torch

from runner.config.run_config import RunConfig
from runner.errors import NoMemoryError, UsageError, human_size, says_no_memory
from runner.job.plan import TrainingPlan, decide
from runner.job.shapes import Device, ModelShape

_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_SIZE = r"(?P<{0}>[\d.]+) (?P<{0}_unit>bytes|KiB|MiB|GiB)"
_ASKED = re.compile(rf"[Tt]ried to allocate {_SIZE.format('asked')}")
_FREE = re.compile(rf"of which {_SIZE.format('free')} is free")
_IDLE = re.compile(rf"{_SIZE.format('idle')} is reserved by PyTorch but unallocated")
_OTHERS = re.compile(rf"Process (?P<pid>\d+) has {_SIZE.format('used')} memory in use")
_SAID = (
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "Resource temporarily unavailable",  # no memory for a thread's stack
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory ran out.

    torch has a class for its own allocator; other libraries say so only in the message.
    """
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return says_no_memory(str(error)) or any(words in str(error) for words in _SAID)


def explain(
    error: BaseException,
    config: RunConfig,
    shape: ModelShape,
    plan: TrainingPlan,
    device: Device,
    where: str,
) -> NoMemoryError:
    """Explains a lack of memory, with the settings that need less.

    Args:
        error: what was raised; its numbers are read from torch's message.
        config: the run file.
        shape: the model's counts.
        plan: how the run is divided.
        device: the device of this rank.
        where: the rank and what it did, such as `rank 3, after step 57`.

    Returns:
        The error to raise. Exit code 5, as for every lack of memory.
    """
    said = str(error)
    asked, free = _size(_ASKED, said), _size(_FREE, said)
    wanted = f"{human_size(asked)} more than there is" if asked else "more than there is"
    if asked and free is not None:
        wanted = f"{human_size(asked)} more, and {human_size(free)} are free"
    zero = f", ZeRO stage {plan.zero}" if config.engine.name == "deepspeed" else ""
    checkpointed = "with" if config.activation_checkpointing else "without"
    message = (
        f"{where}: out of memory on {device.name} ({human_size(device.memory)}): it needed "
        f"{wanted}. The run has micro batch {plan.micro} of {plan.sequence_length} tokens"
        f"{zero}, {plan.precision}, {checkpointed} activation checkpointing."
    )
    used = list(_OTHERS.finditer(said))
    if used:
        sizes = ", ".join(f"{_bytes(match, 'used')} by process {match['pid']}" for match in used)
        message += f" Memory of this GPU is in use by other processes: {sizes} (see nvidia-smi)."
    options = _options(config, shape, plan, device)
    idle = _size(_IDLE, said)
    if idle and asked and idle > asked:
        options.append("export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True (fragmentation)")
    remedy = "; or ".join(options) or "Use more devices, or devices with more memory"
    return NoMemoryError(message, f"{remedy}. Then run it again.")


def _options(config: RunConfig, shape: ModelShape, plan: TrainingPlan, device: Device) -> list[str]:
    """What to set so that a rank needs less memory, the cheapest first."""
    found = []
    if smaller := _smaller_micro(config, shape, plan, device):
        found.append(f"{config.how_to_set('batch.micro', smaller)} (the same steps, less at once)")
    if not config.activation_checkpointing:
        found.append("set activation_checkpointing: true (a third more computing)")
    if more := _partition_more(config, plan):
        found.append(more)
    return found


def _smaller_micro(
    config: RunConfig, shape: ModelShape, plan: TrainingPlan, device: Device
) -> int | None:
    """The largest micro batch that fits by the plan and is smaller than this one; None: none."""
    share = plan.total // plan.world_size
    most = plan.micro - 1
    automatic = replace(config, batch=replace(config.batch, micro="auto", total=plan.total))
    try:
        most = min(most, decide(automatic, shape, device, plan.world_size).micro)
    except UsageError:  # it does not fit at all by the plan
        most = min(most, 1)
    return max((size for size in range(1, most + 1) if share % size == 0), default=None)


def _partition_more(config: RunConfig, plan: TrainingPlan) -> str:
    """How to keep less of the model's state on each device; empty: all is done already."""
    engine, highest = config.engine, 2 if config.quantization else 3
    if plan.world_size > 1 and plan.zero < highest:
        if engine.name == "ddp":
            return "set engine: {name: deepspeed, zero: 2}"
        if engine.name == "fsdp":
            return "set engine.sharding: full"
        return _lowered(config.how_to_set("engine.zero", plan.zero + 1))
    if engine.name != "ddp" and plan.offload == "none" and config.optimizer.name == "adamw":
        return _lowered(config.how_to_set("engine.offload", "cpu")) + " (slower)"
    return ""


def _lowered(text: str) -> str:
    return f"{text[0].lower()}{text[1:]}"


def _size(pattern: re.Pattern[str], text: str) -> int | None:
    match = pattern.search(text)
    return int(float(match[1]) * _UNITS[match[2]]) if match else None


def _bytes(match: re.Match[str], name: str) -> str:
    return human_size(int(float(match[name]) * _UNITS[match[f"{name}_unit"]]))
