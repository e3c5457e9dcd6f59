"""The arithmetic of a run: what `auto` means for this model on this many devices of this kind. Pure.

(run file, model's shape, device) -> `Plan`: sequence length, batch triple, precision, what is partitioned and what
offloaded, steps, each with the reason that is printed. What cannot be is refused here, with the nearest that can,
before a model is built.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from runner.config import RunConfig
from runner.errors import UsageError, human_count, human_size
from runner.fields import Choice
from runner.memory import SHARE_FOR_STATE, check_fits, model_state, state_in_words, state_needed, too_large
from runner.shapes import Device, ModelShape

LONGEST_BY_DEFAULT = 512
DEFAULT_GLOBAL = 32
MICRO_ON_CPU = 8
MICRO_UNKNOWN = 32


@dataclass(frozen=True)
class Plan:
    """One run, decided. `choices` are for printing: what the user did not choose.

    Attributes:
        zero: what is partitioned among the ranks, as a ZeRO stage, whichever engine does it.
        offload: where optimizer state (at stage 3: weights too) lies: `none` is the device.
    """

    sequence_length: int
    world_size: int
    total: int
    micro: int
    accumulation: int
    precision: str
    zero: int
    choices: tuple[Choice, ...]
    offload: str = "none"


def sequence_length(config: RunConfig, shape: ModelShape) -> tuple[int, Choice | None]:
    """The sequence length, and the choice if it was one.

    Raises:
        UsageError: longer than the model's positions.
    """
    wanted = config.sequence_length
    if config.task == "image-classification":
        return shape.longest or 1, None
    if wanted == "auto":
        length = min(shape.longest or LONGEST_BY_DEFAULT, LONGEST_BY_DEFAULT)
        return length, Choice(
            "sequence_length",
            length,
            f"the model takes {shape.longest or 'any'}; at most {LONGEST_BY_DEFAULT} unless asked",
        )
    if shape.longest and wanted > shape.longest:
        raise UsageError(
            f"{config.path}: sequence_length {wanted}: the model `{config.model.asset}` has {shape.longest} positions.",
            f"Set sequence_length: {shape.longest} or less.",
        )
    return int(wanted), None


def decide(config: RunConfig, shape: ModelShape, device: Device, world_size: int) -> Plan:
    """Decides everything that is `auto`.

    Raises:
        UsageError: a batch that does not divide, a precision the device has not, a stage that does not fit.
    """
    length, chosen = sequence_length(config, shape)
    precision, why_precision = _precision(config, device)
    config = replace(config, precision=precision)  # type: ignore[arg-type]  # one of its values
    zero, spread = _spread(config, shape, device, world_size, precision)
    offload, offload_choice = _offload(config, device)
    total, micro, accumulation, batch_choices = _batch(config, shape, device, world_size, length, zero, offload)
    choices = [
        *([chosen] if chosen else []),
        Choice("precision", precision, why_precision),
        spread,
        *([offload_choice] if offload_choice else []),
        *batch_choices,
    ]
    decided = tuple(choice for choice in choices if choice.reason != config.as_said(choice.key))
    return Plan(length, world_size, total, micro, accumulation, precision, zero, decided, offload)


def num_steps(config: RunConfig, num_sequences: int, total: int) -> int:
    """Optimizer steps of the whole run."""
    return config.steps if config.steps is not None else max(1, math.ceil((config.epochs or 0) * num_sequences / total))


def check_batch(config: RunConfig, world_size: int) -> None:
    """Refuses a batch triple that cannot be, naming the nearest that can.

    Raises:
        UsageError: `batch.global` is not a multiple of ranks x micro.
    """
    total, micro = config.batch.total, config.batch.micro
    unit = world_size * (micro if isinstance(micro, int) else 1)
    if isinstance(total, int) and total % unit:
        below, above = total - total % unit, total + unit - total % unit
        nearest = f"{below} or {above}" if below else str(above)
        ranks = human_count(world_size, "rank")
        what = f"{ranks} x micro {micro}" if isinstance(micro, int) else ranks
        remedy = f"Set batch.global: {nearest}"
        if isinstance(micro, int) and total % world_size == 0:
            share = total // world_size
            remedy += f", or batch.micro: {max(d for d in range(1, min(micro, share) + 1) if share % d == 0)}"
        raise UsageError(f"{config.path}: batch.global {total} does not divide among {what}.", f"{remedy}.")


def _precision(config: RunConfig, device: Device) -> tuple[str, str]:
    wanted = config.precision
    if wanted == "bf16" and device.kind == "cuda" and not device.has_bf16:
        raise UsageError(
            f"{config.path}: precision bf16: the device {device.name} does not have it.",
            "Set precision: fp16, or auto.",
        )
    if wanted == "fp16" and not device.has_fp16:
        raise UsageError(
            f"{config.path}: precision fp16: the device {device.name} does not have it.",
            f"Set precision: {'bf16, fp32' if device.has_bf16 else 'fp32'}, or auto.",
        )
    if wanted != "auto":
        return wanted, config.as_said("precision")
    if device.kind == "cpu":
        return "fp32", "on a CPU"
    if device.has_bf16:
        return "bf16", f"{device.name} has it"
    return (
        ("fp16", f"{device.name} has no bf16; with loss scaling")
        if device.has_fp16
        else ("fp32", f"{device.name} has neither")
    )


def _spread(
    config: RunConfig, shape: ModelShape, device: Device, world_size: int, precision: str
) -> tuple[int, Choice]:
    """What the ranks partition, as a ZeRO stage."""
    engine = config.engine
    needs = state_needed(config, shape, world_size)
    if engine.name == "deepspeed":
        zero, why = _zero(config, needs, shape, device, world_size, precision)
        return zero, Choice("engine.zero", zero, why)
    zero = 0 if engine.name == "ddp" else 2 if engine.sharding == "grad_op" else 3
    check_fits(config, needs, shape, device, world_size, zero)
    size = f"{human_size(needs[zero])} of model state a rank"
    if engine.name == "ddp":
        return 0, Choice("engine.name", "ddp", f"as the run file says; {size}, everything on every rank")
    why = "as the run file says" if engine.sharding else "the least memory"
    return zero, Choice("engine.sharding", engine.sharding or "full", f"{why}; {size}")


def _zero(
    config: RunConfig, needs: Mapping[int, int], shape: ModelShape, device: Device, world_size: int, precision: str
) -> tuple[int, str]:
    lowest = 0 if precision == "fp32" else 1
    if config.engine.offload != "none":
        lowest = max(lowest, 3 if config.engine.offload == "nvme" else 1)
    room = int(device.memory * SHARE_FOR_STATE)
    wanted = config.engine.zero
    if wanted != "auto":
        stage = max(int(wanted), lowest)
        check_fits(config, needs, shape, device, world_size, stage)
        if wanted >= lowest:
            return stage, config.as_said("engine.zero")
        if config.engine.offload == "nvme":
            return stage, "DeepSpeed offloads to NVMe at stage 3 only"
        if precision == "fp32":
            return stage, "stage 0 offloads nothing"
        # DeepSpeed's plain bf16/fp16 optimizer counts a dummy step in Adam's bias correction.
        return stage, f"stage 0 in {precision} makes a wrong first update in DeepSpeed; stage 1 does not"
    highest = max(needs)
    for stage in range(lowest, highest + 1):
        if needs[stage] <= room:
            where = f", offload {config.engine.offload}" if config.engine.offload != "none" else ""
            return stage, (
                f"the lowest that fits: {state_in_words(config, shape)}{where} are "
                f"{human_size(needs[stage])} a rank of {human_size(room)} ({SHARE_FOR_STATE:.0%} of {device.name})"
            )
    raise too_large(config, needs[highest], room, f"at any ZeRO stage up to {highest}", shape, device, world_size)


def _offload(config: RunConfig, device: Device) -> tuple[str, Choice | None]:
    wanted = config.engine.offload
    if wanted == "cpu" and device.kind == "cpu" and config.engine.name == "fsdp":
        return "none", Choice("engine.offload", "none", "everything is on the CPU already")
    return wanted, None


def _batch(
    config: RunConfig, shape: ModelShape, device: Device, world_size: int, length: int, zero: int, offload: str
) -> tuple[int, int, int, list[Choice]]:
    choices = []
    check_batch(config, world_size)
    total, micro = config.batch.total, config.batch.micro
    if total == "auto":
        theirs = config.deepspeed.get("gradient_accumulation_steps", 1)
        unit = world_size * theirs * (micro if isinstance(micro, int) else 1)
        times = f" x {theirs} of accumulation (from your ds_config.json)" if theirs != 1 else ""
        # Their accumulation is kept: with a micro batch of theirs too, nothing is left to round up to.
        total = unit if theirs != 1 and isinstance(micro, int) else math.ceil(DEFAULT_GLOBAL / unit) * unit
        choices.append(
            Choice(
                "batch.global", total, f"{DEFAULT_GLOBAL}, to a multiple of {human_count(world_size, 'rank')}{times}"
            )
        )
        if theirs != 1 and micro == "auto":
            micro = total // (world_size * theirs)
            choices.append(Choice("batch.micro", micro, f"{total} / {human_count(world_size, 'rank')}{times}"))
    share = total // world_size
    if micro == "auto":
        state = model_state(config, shape, zero, world_size, offload)
        fits, reason = _largest_micro(shape, device, length, state)
        micro = max(size for size in range(1, share + 1) if share % size == 0 and size <= max(1, fits))
        choices.append(Choice("batch.micro", micro, f"the largest divisor of {share} up to {fits}: {reason}"))
    accumulation = share // int(micro)
    choices.append(
        Choice("accumulation", accumulation, f"{total} = {human_count(world_size, 'rank')} x {micro} x {accumulation}")
    )
    return total, int(micro), accumulation, choices


def _largest_micro(shape: ModelShape, device: Device, length: int, state: int) -> tuple[int, str]:
    if device.kind == "cpu":
        return MICRO_ON_CPU, "more does not make a CPU faster"
    if not shape.hidden:
        return MICRO_UNKNOWN, "nothing is known of the activations of such a model"
    # 34 bytes x length x hidden a layer (Korthikanti et al., arXiv:2205.05198, eq. 2, without the attention map, which
    # SDPA does not keep), and the logits in fp32 with their gradient.
    sequence = length * (34 * shape.hidden * shape.layers + 8 * shape.vocabulary)
    room = max(0, int(device.memory * 0.9) - state)
    return room // max(1, sequence), f"about {human_size(sequence)} of activations a sequence in {human_size(room)}"
