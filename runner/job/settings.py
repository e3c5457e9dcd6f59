"""Settings that are probably not meant, and a micro batch that does not fit. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runner.config.run_config import RunConfig
from runner.errors import StageError, UsageError, human_size
from runner.job.findings import Finding
from runner.job.memory import USABLE, activation_bytes, model_state
from runner.job.plan import TrainingPlan, accumulation_of, largest_micro
from runner.job.shapes import Device, ModelShape
from runner.job.weights import text_settings

SURELY_TOO_MUCH = 3
"""Times a GPU's memory: an estimated need above it is refused. Below it, it is a warning."""


def check_micro(
    config: RunConfig, shape: ModelShape, plan: TrainingPlan, device: Device
) -> tuple[list[StageError], list[Finding]]:
    """Finds a micro batch of the run file that does not fit on the device, as it is estimated.

    Args:
        config: the run file, with its precision decided.
        shape: the model's counts.
        plan: the run's settings, decided.
        device: of each rank.

    Returns:
        Errors, and warnings.
    """
    state = model_state(config, shape, plan.zero, plan.world_size, plan.offload)
    fixed, each = activation_bytes(config, shape, plan.sequence_length, plan.zero)
    need = state + fixed + plan.micro * each
    if not each or need <= device.memory * USABLE:
        return [], []
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
        return [UsageError(text, f"{remedy}.")], []
    return [], [Finding("warning", text, f"{remedy}.")]


def check_precision(
    config: RunConfig, settings: Mapping[str, Any], precision: str
) -> list[Finding]:
    """Finds fp16 for weights that were trained in bfloat16.

    bf16 reaches 3.4e38, fp16 65504: activations of such models overflow, and the loss becomes nan
    or the loss scale falls to its minimum (github.com/huggingface/transformers/issues/14189, T5).

    Args:
        config: the run file.
        settings: the content of config.json.
        precision: of the run, decided.
    """
    text = text_settings(settings)
    trained = next(
        (s[k] for s in (text, settings) for k in ("dtype", "torch_dtype") if s.get(k)), None
    )
    if precision != "fp16" or trained != "bfloat16" or config.model.init == "scratch":
        return []
    return [
        Finding(
            "warning",
            f"{config.place('precision')}: "
            f"precision fp16, and `{config.model.asset}` was trained in bfloat16 "
            "(config.json): its activations may be too large for fp16, and the loss becomes nan.",
            f"{config.how_to_set('precision', 'fp32')}, or use GPUs that have bf16 (A100 or newer) "
            "and precision: bf16.",
        )
    ]


def check_warmup(config: RunConfig) -> list[Finding]:
    """Finds a warm-up that is not over when the run ends: the learning rate never gets there."""
    warmup, steps = config.schedule.warmup, config.steps
    if steps is None or warmup < 1 or warmup < steps:
        return []
    return [
        Finding(
            "warning",
            f"{config.place('schedule.warmup')}: "
            f"schedule.warmup {warmup:g} steps of {steps}: the learning rate never "
            f"reaches {config.optimizer.lr:g}.",
            f"{config.how_to_set('schedule.warmup', 0.05)} (a share of all steps), or more steps.",
        )
    ]


def check_rate(config: RunConfig) -> list[Finding]:
    """Finds a learning rate that only a slip of the pen explains: 5, or 2e5, for 5e-5.

    Adam and Lion change each weight by about the rate in each step.
    """
    rate, name = config.optimizer.lr, config.optimizer.name
    if rate < 1 or name in ("sgd", "adafactor"):
        return []
    return [
        Finding(
            "warning",
            f"{config.place('optimizer.lr')}: optimizer.lr {rate:g}: with {name} each step changes "
            "each weight by about that much, and nothing is left of the model.",
            f"{config.how_to_set('optimizer.lr', '5.0e-5')} (the default), or the rate that is "
            "meant.",
        )
    ]


def check_accumulation(config: RunConfig, total: int, micro: int, ranks: int) -> list[Finding]:
    """Finds another accumulation in the user's ds_config.json than the run will have.

    Args:
        config: the run file.
        total: sequences per step.
        micro: sequences per forward pass of a rank.
        ranks: number of ranks.
    """
    if config.accumulation is None:
        return []
    found = accumulation_of(config, total, micro, ranks)
    if found.value == config.accumulation:
        return []
    name = Path(config.engine.config or "").name
    theirs = ranks * micro * config.accumulation
    return [
        Finding(
            "warning",
            f"accumulation: {found.value}  ({found.reason})",
            f"{config.how_to_set('batch.global', theirs)} to keep theirs, or write "
            f'"gradient_accumulation_steps": "auto" in {name}.',
        )
    ]
