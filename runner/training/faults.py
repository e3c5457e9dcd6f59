"""What an error means that ends a rank: no memory, a disk, a lost rank; and what to do then.

For a lack of memory: what was asked for, what there is, what would fit.
"""

from __future__ import annotations

import os
import re
import traceback
from pathlib import Path

import torch
from safetensors import SafetensorError

from runner.config.run_config import RunConfig
from runner.disks import what_is_used_up
from runner.errors import LostPeerError, NoMemoryError
from runner.from_stage import (
    IncompleteError,
    StageError,
    UsageError,
    as_shown,
    human_size,
    says_no_memory,
)
from runner.inputs import unreadable
from runner.job.plan import TrainingPlan, largest_divisor
from runner.job.shapes import Device
from runner.job.training_run import TrainingRun
from runner.launch.ranks import RankInfo
from runner.launch.reach import says_lost_peer
from runner.launch.resolved import Resolved
from runner.run_folder.layout import RunFolder
from runner.run_folder.training_state import by_step_newest_first
from runner.training.loop import Trainer

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


def explained(
    error: Exception,
    info: RankInfo,
    run: TrainingRun,
    device: Device | None,
    whole: Resolved | None,
    trainer: Trainer | None,
) -> StageError | None:
    """Explains what ended the work of a rank; None: its own traceback says most.

    Args:
        device: of this rank; None: not known yet.
        whole: what is decided, with the plan; None: nothing is.
        trainer: None: it is not made yet.
    """
    found: Exception | None = error
    if isinstance(error, SafetensorError):
        found = write_error(error)
        if found is None:
            return unreadable(run.inputs.model.path, f"its weights: {error}")
    if isinstance(found, OSError):
        return disk_error(found, run.inputs.bundle, run.folder, trainer.step if trainer else 0)
    if is_out_of_memory(error):
        if whole is None or device is None:
            return _no_memory_to_begin(error, device, info)
        return _no_memory(error, whole, trainer, device, info)
    if not says_lost_peer(str(error)):
        return None
    traceback.print_exc()
    return LostPeerError(
        f"rank {info.rank} lost another rank; the other logs in {run.folder.logs} show why.",
        "Run the same command again: it resumes from the last checkpoint.",
    )


def write_error(error: SafetensorError) -> OSError | None:
    """Returns the system's error if safetensors could not write; None: it could not read.

    Its own words: `Error while serializing: I/O error: No space left on device (os error 28)`.
    """
    number = re.search(r"\(os error (\d+)\)", str(error))
    if number is None or "while serializing" not in str(error):
        return None
    return OSError(int(number[1]), os.strerror(int(number[1])))


def disk_error(error: OSError, bundle: Path, folder: RunFolder, step: int) -> StageError:
    """Explains an error of a disk: a file of the bundle cannot be read, or a disk cannot be
    written.

    Args:
        error: what was raised.
        bundle: its folder.
        folder: the run folder.
        step: the number of steps done.

    Returns:
        The error to raise.
    """
    name = Path(os.fsdecode(error.filename)) if isinstance(error.filename, (str, bytes)) else None
    if name is not None and name.is_relative_to(bundle):
        return unreadable(name, error.strerror or str(error))
    # transformers raises an OSError without a number, which names the folder.
    if error.errno is None and str(bundle) in str(error):
        return unreadable(bundle, str(error).strip().splitlines()[0].rstrip("."))
    newest = next(iter(by_step_newest_first(folder.checkpoints)), None)
    safe = (
        f"{newest} was written before and is whole" if newest else "no checkpoint had been written"
    )
    words, remedy = str(error.strerror or error), "Correct that"
    if used_up := what_is_used_up(folder.root, error):
        words, remedy = ": ".join(filter(None, (words, used_up[0]))), used_up[1]
    elif not error.errno:  # torch's disk errors have no number
        remedy = "Look at space, quota and permissions there"
    return IncompleteError(
        f"{name or folder.root}: {words}, after step {step}; {safe}.",
        f"{remedy}, then run the same command again"
        + (f": it resumes from {newest.name}." if newest else "."),
    )


def _no_memory_to_begin(error: BaseException, device: Device | None, info: RankInfo) -> StageError:
    """Explains a lack of memory before anything of the run is loaded; less of it would not help."""
    on = f" on {device.name} ({human_size(device.memory)})" if device else ""
    said = (str(error).strip().splitlines() or [type(error).__name__])[-1]
    return IncompleteError(
        f"rank {info.rank}: out of memory{on}, and nothing of this run is loaded yet: other "
        f"processes have it, or a limit is too low. Its last words: {as_shown(said)}",
        "nvidia-smi   (there: which processes; take another GPU or node, or end them. On a CPU: "
        "ulimit -a). Then run it again.",
    )


def _no_memory(
    error: BaseException, whole: Resolved, trainer: Trainer | None, device: Device, info: RankInfo
) -> NoMemoryError:
    """Explains a lack of memory. Only our launcher starts the ranks again with a smaller micro
    batch: those of another one end with 2, because the run file has to say it.
    """
    when = f"after step {trainer.step}" if trainer else "while loading"
    config, plan = whole.run.config, whole.decided()
    if trainer is not None:
        trainer.phases.first_steps.lift()
    fault = explain(error, config, plan, device, f"rank {info.rank}, {when}")
    if trainer is not None and trainer.phases.first_steps.are_tried and not info.is_ours:
        fault.exit_code = UsageError.exit_code
    return fault


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
    remedy = "; or ".join(_options(config, plan)) or "Use more devices, or devices with more memory"
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
