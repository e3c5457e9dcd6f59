"""Settings that are probably not meant, and a micro batch that does not fit. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from runner.config.run_config import RunConfig
from runner.errors import UsageError, human_size
from runner.job.findings import Finding, warning
from runner.job.memory import USABLE, activation_bytes, model_state
from runner.job.plan import TrainingPlan, accumulation_of, largest_micro
from runner.job.shapes import Device, ModelShape, text_settings

SURELY_TOO_MUCH = 3
"""Times a GPU's memory: an estimated need above it is refused. Below it, it is a warning."""


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
    fitting = [size for size in range(1, min(fits, share) + 1) if share % size == 0]
    remedy = "Shorten sequence_length"
    if fitting:
        remedy = (
            f"{config.how_to_set('batch.micro', max(fitting))}: batch.global stays {plan.total}, "
            "by accumulation"
        )
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


def check_settings(
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


def check_accumulation(config: RunConfig, total: int, micro: int, ranks: int) -> Iterator[Finding]:
    """Finds another accumulation in the user's ds_config.json than the run will have."""
    chosen = accumulation_of(config, total, micro, ranks)
    divides = total % (micro * ranks) == 0  # else the batch itself is refused
    if config.accumulation in (None, chosen.value) or not divides:
        return
    theirs = ranks * micro * (config.accumulation or 1)
    yield warning(
        f"accumulation: {chosen.value}  ({chosen.reason})",
        f"{config.how_to_set('batch.global', theirs)} to keep theirs, or write "
        f'"gradient_accumulation_steps": "auto" in {Path(config.engine.config or "").name}.',
    )
