"""Decides what `auto` means for this model on this number of devices of this kind. Pure.

(run file, model's shape, device) -> `TrainingPlan`: sequence length, batch triple, precision,
partitioning, offload. Each choice has a reason, which is printed. An impossible setting is refused
here, before a model is built. The message names the nearest possible setting. The last functions
find settings that are probably not meant, and a micro batch that does not fit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from runner.config.engine import EngineConfig
from runner.config.fields import Choice
from runner.config.run_config import RunConfig
from runner.from_stage import UsageError, human_count, human_size
from runner.job.findings import Finding, warning
from runner.job.memory import (
    SHARE_FOR_STATE,
    SURELY_TOO_MUCH,
    USABLE,
    activation_bytes,
    check_fits,
    describe_state,
    largest_micro,
    model_state,
    state_needed,
    too_large,
)
from runner.job.shapes import Device, ModelShape, text_settings
from runner.tasks import task_named

LONGEST_BY_DEFAULT = 512  # tokens, as BERT has them: a model that takes 100,000 would fill any GPU
DEFAULT_GLOBAL = 32  # sequences, for fine-tuning (BERT, arXiv:1810.04805, A.3)
# Chosen, not measured: a few sequences keep all cores busy. The first steps show whether it fits.
MICRO_ON_CPU = 8
# A step of at least `LARGE_STEP` sequences that has each one so many times is a mistake. Both are
# chosen: somebody who counts tokens writes at least 1024, and a trial with little data writes less.
LARGE_STEP = 1024
TIMES_IN_A_STEP = 10
MUCH_LONGER = 1.1
"""A run that makes so many times its epochs, because its last step is whole, is told."""


@dataclass(frozen=True)
class TrainingPlan:
    """All settings of one run, decided.

    Attributes:
        sequence_length: tokens per sequence.
        world_size: number of ranks.
        total: sequences per optimizer step.
        micro: sequences per forward pass of a rank.
        accumulation: forward passes of a rank per optimizer step.
        precision: `bf16`, `fp16` or `fp32`.
        zero: what the ranks partition, as a ZeRO stage, for every engine.
        choices: what the user did not choose, for printing.
        offload: where the optimizer state is (at stage 3 also the weights); `none`: on the device.
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


@dataclass(frozen=True)
class MicroBound:
    """What earlier starts of a run have shown of micro batches.

    Attributes:
        tried_with: what they were tried with; it counts only for the same.
        most: larger ones did not fit.
        why: what they ended with.
    """

    tried_with: Mapping[str, str]
    most: int
    why: str


def sequence_length(config: RunConfig, shape: ModelShape) -> tuple[int, Choice | None]:
    """Returns the sequence length (tokens), and the choice if it was automatic.

    Raises:
        UsageError: it is longer than the model's positions.
    """
    wanted = config.sequence_length
    if not task_named(config.task).has_tokens:
        # An image has as many patches as the model has positions. A model without positions, such
        # as a convolutional one, takes the image as one whole.
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
            f"{config.place('sequence_length')}: "
            f"sequence_length {wanted}: the model `{config.model.asset}` has "
            f"{shape.longest} positions.",
            f"Set sequence_length: {shape.longest} or less.",
        )
    return int(wanted), None


def decide(
    config: RunConfig,
    shape: ModelShape,
    chosen_length: tuple[int, Choice | None],
    device: Device,
    world_size: int,
) -> TrainingPlan:
    """Decides everything that is `auto`.

    Args:
        config: the run file.
        shape: the model's counts.
        chosen_length: of a sequence, by `sequence_length`.
        device: the device of each rank.
        world_size: number of ranks.

    Raises:
        UsageError: the batch does not divide among the ranks, the device lacks the precision, or
            the model's state does not fit.
    """
    length, chosen = chosen_length
    precision, why_precision = precision_on(config, device)
    config = replace(config, precision=precision)  # type: ignore[arg-type]  # one of its values
    zero, spread = _spread(config, shape, device, world_size, precision)
    offload, offload_choice = _offload(config, device)
    total, micro, accumulation, batch_choices = _batch(
        config, shape, device, world_size, length, zero, offload
    )
    precision_choice = Choice("precision", precision, why_precision) if why_precision else None
    choices = (chosen, precision_choice, spread, offload_choice, *batch_choices)
    decided = tuple(choice for choice in choices if choice is not None)
    return TrainingPlan(
        length, world_size, total, micro, accumulation, precision, zero, decided, offload
    )


def can_be_smaller(config: RunConfig, plan: TrainingPlan) -> bool:
    """Whether the micro batch is automatic and may be halved; a ds_config.json may decide it."""
    is_theirs = config.batch.total == "auto" and config.accumulation is not None
    return config.batch.micro == "auto" and plan.micro > 1 and not is_theirs


def with_micro(config: RunConfig, plan: TrainingPlan, bound: MicroBound) -> TrainingPlan:
    """The plan with a micro batch that may fit: the same steps, less at once. Pure.

    Args:
        config: the run file, whose `batch.micro` is automatic.
        plan: what `decide` has decided.
        bound: what earlier starts have shown.
    """
    if not can_be_smaller(config, plan) or plan.micro <= bound.most:
        return plan
    share = plan.micro * plan.accumulation
    micro = largest_divisor(share, bound.most)
    reason = f"the largest divisor of {share} up to {bound.most}: {bound.why}"
    accumulation = accumulation_of(config, plan.total, micro, plan.world_size)
    new = (Choice("batch.micro", micro, reason), accumulation)
    choices = {choice.key: choice for choice in (*plan.choices, *new)}
    return replace(plan, micro=micro, accumulation=share // micro, choices=tuple(choices.values()))


def largest_divisor(share: int, most: int) -> int:
    """Returns the largest micro batch up to `most` that divides a rank's share of a step."""
    return max(size for size in range(1, max(1, min(most, share)) + 1) if share % size == 0)


def num_steps(config: RunConfig, num_sequences: int, total: int) -> int:
    """Returns the number of optimizer steps of the whole run.

    Args:
        config: the run file.
        num_sequences: sequences in one epoch.
        total: sequences per optimizer step.
    """
    return (
        config.steps
        if config.steps is not None
        else max(1, math.ceil((config.epochs or 0) * num_sequences / total))
    )


def check_step(config: RunConfig, num_sequences: int, total: int) -> Iterator[Finding]:
    """Refuses a step that has each sequence many times. It teaches no more than one that has each
    once, and may never end.

    Args:
        config: the run file.
        num_sequences: sequences in one epoch.
        total: sequences per optimizer step.

    Yields:
        A warning where a step has some of them several times, or where the whole last step makes
        the run longer than its epochs, by `MUCH_LONGER`.

    Raises:
        UsageError: that is so. A small step is a trial with little data, and is not refused.
    """
    times = total // max(1, num_sequences)
    data = f"{config.place('batch.global')}: the training data are "
    data += human_count(num_sequences, "sequence")
    remedy = config.how_to_set("batch.global", f"{num_sequences} or less")
    remedy += ", or give it more data."
    if total >= LARGE_STEP and times >= TIMES_IN_A_STEP:
        raise UsageError(
            f"{data}, and each step would take {total:,}: each of "
            f"them {times:,} times. batch.global counts sequences, not tokens.",
            remedy,
        )
    several = ": each step has some of them several times" if num_sequences < total else ""
    steps, longer = num_steps(config, num_sequences, total), ""
    end = steps * total / max(1, num_sequences)
    if config.epochs and end > MUCH_LONGER * config.epochs:
        longer = (
            f" {human_count(steps, 'whole step')} end at epoch {end:.2f}, not {config.epochs:g}."
        )
    if several or longer:
        yield warning(f"{data}, a step takes {total}{several}.{longer}", remedy)


def check_batch(config: RunConfig, world_size: int) -> None:
    """Refuses an impossible batch triple and names the nearest possible one.

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
        remedy = config.how_to_set("batch.global", nearest)
        if isinstance(micro, int) and total % world_size == 0:
            share = total // world_size
            other = config.how_to_set("batch.micro", largest_divisor(share, micro))
            remedy += f", or {other[0].lower()}{other[1:]}"
        raise UsageError(
            f"{config.place('batch.global')}: batch.global {total} does not divide among {what}.",
            f"{remedy}.",
        )


def accumulation_of(config: RunConfig, total: int, micro: int, world_size: int) -> Choice:
    """Returns the micro batches per step on each rank.

    The reason also explains the difference where the user's ds_config.json has another number.
    """
    accumulation = total // (world_size * micro)
    why = f"{total} = {human_count(world_size, 'rank')} x {micro} x {accumulation}"
    if config.accumulation is not None and config.accumulation != accumulation:
        why += (
            f"; {config.their_file} says gradient_accumulation_steps: "
            f"{config.accumulation}, with which a step would have "
            f"{world_size * micro * config.accumulation} sequences: batch.global decides"
        )
    return Choice("accumulation", accumulation, why)


def precision_on(config: RunConfig, device: Device) -> tuple[str, str]:
    """Returns the precision, and why; empty: the user chose it.

    Raises:
        UsageError: the device lacks the one that is asked for.
    """
    wanted = config.precision
    if wanted == "bf16" and device.kind == "cuda" and not device.has_bf16:
        raise UsageError(
            f"{config.place('precision')}: "
            f"precision bf16: the device {device.name} does not have it.",
            config.how_to_set("precision", "fp16, or auto" if device.has_fp16 else "fp32, or auto")
            + ".",
        )
    if wanted == "fp16" and not device.has_fp16:
        others = "bf16, fp32" if device.has_bf16 else "fp32"
        raise UsageError(
            f"{config.place('precision')}: "
            f"precision fp16: the device {device.name} does not have it.",
            config.how_to_set("precision", f"{others}, or auto") + ".",
        )
    if wanted != "auto":
        return wanted, ""
    if device.kind == "cpu":
        return "fp32", "on a CPU"
    if device.has_bf16 and "bf16" in config.half:
        return "bf16", f"{device.name} has it"
    why = f"{device.name} has no bf16"
    if "bf16" not in config.half:
        why = f"{config.their_file} does not allow bf16"
    if device.has_fp16 and "fp16" in config.half:
        return "fp16", f"{why}; with loss scaling"
    return "fp32", f"{why}, and no fp16"


def zero_of(engine: EngineConfig) -> int:
    """What the ranks of ddp and fsdp partition, as a ZeRO stage."""
    return 0 if engine.name == "ddp" else 2 if engine.sharding == "grad_op" else 3


def _spread(
    config: RunConfig, shape: ModelShape, device: Device, world_size: int, precision: str
) -> tuple[int, Choice | None]:
    """Decides what the ranks partition, as a ZeRO stage; without a choice: the user chose it."""
    engine = config.engine
    needs = state_needed(config, shape, world_size)
    if engine.name == "deepspeed":
        zero, why = _zero(config, needs, shape, device, world_size, precision)
        choice = Choice("engine.zero", zero, why) if why else None
        return zero, choice
    zero = zero_of(engine)
    check_fits(config, needs, shape, device, world_size, zero)
    size = f"{human_size(needs[zero])} of model state per rank"
    if engine.name == "ddp":
        return 0, Choice(
            "engine.name", "ddp", f"as the run file says; {size}, everything on every rank"
        )
    why = "as the run file says" if engine.sharding else "the least memory"
    return zero, Choice("engine.sharding", engine.sharding or "full", f"{why}; {size}")


def _zero(
    config: RunConfig,
    needs: Mapping[int, int],
    shape: ModelShape,
    device: Device,
    world_size: int,
    precision: str,
) -> tuple[int, str]:
    """The ZeRO stage of DeepSpeed, and why; empty: the user chose it."""
    # At stage 0 DeepSpeed's bf16/fp16 optimizer counts a dummy step in Adam's bias correction.
    lowest = 0 if precision == "fp32" else 1
    if config.engine.offload != "none":
        lowest = max(lowest, 3 if config.engine.offload == "nvme" else 1)
    available = int(device.memory * SHARE_FOR_STATE)
    wanted = config.engine.zero
    if wanted != "auto":
        zero = max(int(wanted), lowest)
        check_fits(config, needs, shape, device, world_size, zero)
        why = "" if zero == wanted else _why_not_lower(config, precision)
        return zero, why
    highest = max(needs)
    for zero in range(lowest, highest + 1):
        if needs[zero] <= available:
            where = f", offload {config.engine.offload}" if config.engine.offload != "none" else ""
            return zero, (
                f"the lowest that fits: {describe_state(config, shape)}{where} are "
                f"{human_size(needs[zero])} per rank of {human_size(available)} "
                f"({SHARE_FOR_STATE:.0%} of {device.name})"
            )
    raise too_large(
        config,
        needs[highest],
        available,
        f"at any ZeRO stage up to {highest}",
        shape,
        device,
        world_size,
    )


def _why_not_lower(config: RunConfig, precision: str) -> str:
    if config.engine.offload == "nvme":
        return "DeepSpeed offloads to NVMe at stage 3 only"
    if precision == "fp32":
        return "stage 0 offloads nothing"
    return f"stage 0 in {precision} makes a wrong first update in DeepSpeed; stage 1 does not"


def _offload(config: RunConfig, device: Device) -> tuple[str, Choice | None]:
    wanted = config.engine.offload
    # FSDP2 offloads from a GPU alone. DeepSpeed offloads on a CPU too: it runs as it will on a GPU.
    if wanted == "cpu" and device.kind == "cpu" and config.engine.name == "fsdp":
        return "none", Choice("engine.offload", "none", "everything is on the CPU already")
    return wanted, None


def _batch(
    config: RunConfig,
    shape: ModelShape,
    device: Device,
    world_size: int,
    length: int,
    zero: int,
    offload: str,
) -> tuple[int, int, int, list[Choice]]:
    choices = []
    check_batch(config, world_size)
    total, micro = config.batch.total, config.batch.micro
    theirs = config.accumulation
    if total == "auto":
        total, why = _automatic_total(micro, theirs, world_size)
        choices.append(Choice("batch.global", total, why))
    if micro == "auto" and theirs is not None and total % (world_size * theirs) == 0:
        micro = total // (world_size * theirs)
        why = f"{total} / ({human_count(world_size, 'rank')} x {_from_theirs(theirs)})"
        choices.append(Choice("batch.micro", micro, why))
    share = total // world_size
    if micro == "auto":
        fits, reason = MICRO_ON_CPU, "more does not make a CPU faster"
        if device.kind != "cpu":
            state = model_state(config, shape, zero, world_size, offload)
            fits, reason = largest_micro(config, shape, device, length, zero, state)
        micro = largest_divisor(share, fits)
        choices.append(
            Choice("batch.micro", micro, f"the largest divisor of {share} up to {fits}: {reason}")
        )
    accumulation = accumulation_of(config, total, int(micro), world_size)
    choices.append(accumulation)
    return total, int(micro), share // int(micro), choices


def _automatic_total(micro: int | str, theirs: int | None, world_size: int) -> tuple[int, str]:
    """Chooses `batch.global`; the user's accumulation `theirs` is kept."""
    ranks, each = human_count(world_size, "rank"), micro if isinstance(micro, int) else 1
    unit = world_size * (theirs or 1) * each
    total = math.ceil(DEFAULT_GLOBAL / unit) * unit
    if theirs is None:
        return total, f"{DEFAULT_GLOBAL}, to a multiple of {ranks}"
    if isinstance(micro, int):
        return unit, f"{ranks} x micro {micro} x {_from_theirs(theirs)}"
    return total, f"{DEFAULT_GLOBAL}, to a multiple of {ranks} x {_from_theirs(theirs)}"


def _from_theirs(accumulation: int) -> str:
    return f"{accumulation} of accumulation (your ds_config.json)"


def check_micro(
    config: RunConfig,
    shape: ModelShape,
    plan: TrainingPlan,
    device: Device,
) -> Iterator[Finding]:
    """Finds a micro batch of the run file that does not fit on the device, as it is estimated.

    Args:
        config: the run file, with its precision decided.
        shape: the model's counts.
        plan: the run's settings, decided.
        device: of each rank.
    """
    state = model_state(config, shape, plan.zero, plan.world_size, plan.offload)
    fixed, each = activation_bytes(config, shape, plan.sequence_length, plan.zero)
    need = state + fixed + plan.micro * each
    if not each or need <= device.memory * USABLE:
        return
    fits, _ = largest_micro(config, shape, device, plan.sequence_length, plan.zero, state)
    share = plan.total // plan.world_size
    remedy = "Shorten sequence_length"
    if fits:
        micro = config.how_to_set("batch.micro", largest_divisor(share, fits))
        remedy = f"{micro}: batch.global stays {plan.total}, by accumulation"
    if not config.activation_checkpointing:
        remedy += ", or set activation_checkpointing: true"
    text = (
        f"{config.place('batch.micro')}: "
        f"batch.micro {plan.micro} needs about {human_size(need)} per rank "
        f"({human_size(state)} of model state, {human_size(each)} of activations per sequence); "
        f"{device.name} has {human_size(device.memory)}."
    )
    if need > device.memory * SURELY_TOO_MUCH:
        raise UsageError(text, f"{remedy}.")
    yield warning(text, f"{remedy}.")


def find_odd_settings(
    config: RunConfig, settings: Mapping[str, Any], precision: str
) -> Iterator[Finding]:
    """Finds settings that are probably not meant.

    Args:
        settings: the content of config.json.
        precision: of the run, decided.
    """
    text = text_settings(settings)
    trained = next(
        (s[k] for s in (text, settings) for k in ("dtype", "torch_dtype") if s.get(k)), None
    )
    # bf16 reaches 3.4e38, fp16 65504: activations of such models overflow, and the loss becomes nan
    # or the loss scale falls to its minimum (github.com/huggingface/transformers/issues/14189, T5).
    if precision == "fp16" and trained == "bfloat16" and config.model.init != "scratch":
        yield warning(
            f"{config.place('precision')}: "
            f"precision fp16, and `{config.model.asset}` was trained in bfloat16 "
            "(config.json): its activations may be too large for fp16, and the loss becomes nan.",
            f"{config.how_to_set('precision', 'fp32')}, or use GPUs that have bf16 (A100 or newer) "
            "and precision: bf16.",
        )
    warmup, steps = config.schedule.warmup, config.steps
    if steps is not None and 1 <= warmup >= steps:
        yield warning(
            f"{config.place('schedule.warmup')}: "
            f"schedule.warmup {warmup:g} steps of {steps}: the learning rate never "
            f"reaches {config.optimizer.lr:g}.",
            f"{config.how_to_set('schedule.warmup', 0.05)} (a share of all steps), or more steps.",
        )
    rate, name = config.optimizer.lr, config.optimizer.name
    # Adam and Lion change each weight by about the rate in each step: 5, for 5e-5,
    # is probably a typing error.
    if rate >= 1 and name not in ("sgd", "adafactor"):
        yield warning(
            f"{config.place('optimizer.lr')}: optimizer.lr {rate:g}: with {name} each step changes "
            "each weight by about that much, and nothing is left of the model.",
            f"{config.how_to_set('optimizer.lr', '5.0e-5')} (the default), or the rate that is "
            "meant.",
        )


def find_other_accumulation(
    config: RunConfig, total: int, micro: int, ranks: int
) -> Iterator[Finding]:
    """Finds another accumulation in the user's ds_config.json than the run will have."""
    chosen = accumulation_of(config, total, micro, ranks)
    divides = total % (micro * ranks) == 0  # else the batch itself is refused
    if config.accumulation in (None, chosen.value) or not divides:
        return
    theirs = ranks * micro * (config.accumulation or 1)
    yield warning(
        f"accumulation: {chosen.value}  ({chosen.reason})",
        f"{config.how_to_set('batch.global', theirs)} to keep theirs, or write "
        f'"gradient_accumulation_steps": "auto" in {config.their_file}.',
    )
