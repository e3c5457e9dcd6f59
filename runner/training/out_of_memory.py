"""A device without enough memory, explained: what was asked for, what there is, what would fit."""

from __future__ import annotations

import re

import torch

from runner.config.run_config import RunConfig
from runner.errors import NoMemoryError, human_size, says_no_memory
from runner.job.plan import TrainingPlan, largest_divisor
from runner.job.shapes import Device

_BYTES = re.compile(r"\b(\d+) bytes\b")  # on a CPU
# torch's own words: what it asked for, and what other processes have.
_ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+ \w+)")
_FREE = re.compile(r"of which ([\d.]+ \w+) is free")
_OTHERS = re.compile(r"Process (\d+) has ([\d.]+ \w+) memory in use")
_SAID = (
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "Resource temporarily unavailable",  # no memory for a thread's stack
    "could not create a primitive",  # oneDNN, after it had chosen one: no memory for it
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
    plan: TrainingPlan,
    device: Device,
    where: str,
) -> NoMemoryError:
    """Explains a lack of memory, with the settings that need less.

    Args:
        error: what was raised; its numbers are read from torch's message.
        config: the run file.
        plan: how the run is divided.
        device: the device of this rank.
        where: the rank and what it did, such as `rank 3, after step 57`.

    Returns:
        The error to raise. Exit code 5, as for every lack of memory.
    """
    said = _BYTES.sub(lambda found: human_size(int(found[1])), str(error))
    asked, free = _ASKED.search(said), _FREE.search(said)
    wanted = f"{asked[1]} more than there is" if asked else "more than there is"
    if asked and free:
        wanted = f"{asked[1]} more, and {free[1]} are free"
    zero = f", ZeRO stage {plan.zero}" if config.engine.name == "deepspeed" else ""
    checkpointed = "with" if config.activation_checkpointing else "without"
    message = (
        f"{where}: out of memory on {device.name} ({human_size(device.memory)}): it needed "
        f"{wanted}. The run has micro batch {plan.micro} of {plan.sequence_length} tokens"
        f"{zero}, {plan.precision}, {checkpointed} activation checkpointing."
    )
    if used := _OTHERS.findall(said):
        sizes = ", ".join(f"{size} by process {pid}" for pid, size in used)
        message += f" Memory of this GPU is in use by other processes: {sizes} (see nvidia-smi)."
    options = _options(config, plan)
    remedy = "; or ".join(options) or "Use more devices, or devices with more memory"
    return NoMemoryError(message, f"{remedy}. Then run it again.")


def _options(config: RunConfig, plan: TrainingPlan) -> list[str]:
    """What to set so that a rank needs less memory, the cheapest first."""
    found = []
    if plan.micro > 1:
        smaller = largest_divisor(plan.micro * plan.accumulation, plan.micro // 2)
        found.append(f"{config.how_to_set('batch.micro', smaller)} (the same steps, less at once)")
    if not config.activation_checkpointing:
        found.append("set activation_checkpointing: true (a third more computing)")
    if more := _partition_more(config, plan):
        found.append(more)
    return found


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
