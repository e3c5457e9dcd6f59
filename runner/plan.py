"""The arithmetic of a run: what `auto` means for this model on this many devices of this kind. Pure.

(run file, model's shape, device) -> `Plan`: sequence length, batch triple, precision, ZeRO stage, steps, each with the
reason that is printed. What cannot be is refused here, with the nearest that can, before anything is launched.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from runner.config import Choice, RunConfig
from runner.errors import UsageError, human_size

LONGEST_BY_DEFAULT = 512
DEFAULT_GLOBAL = 32
MICRO_ON_CPU = 8
MICRO_UNKNOWN = 32
# Mixed-precision Adam: 2 + 2 bytes of weights and gradients, 4 + 4 + 4 of fp32 copy and moments (ZeRO,
# arXiv:1910.02054, 3.1). In fp32 there is no copy: 4 + 4 + 4 + 4. Both are 16.
STATE_BYTES = 16
SHARE_FOR_STATE = 0.7  # of a device's memory; the rest is for activations and fragmentation


@dataclass(frozen=True)
class Device:
    """What one rank has.

    Attributes:
        kind: `cuda` or `cpu`.
        memory: bytes a rank may use.
        has_bf16, has_fp16: whether it computes in them at speed.
    """

    kind: str
    name: str
    memory: int
    has_bf16: bool
    has_fp16: bool


@dataclass(frozen=True)
class ModelShape:
    """What the arithmetic needs of a model: counts from its config.json and safetensors headers."""

    num_parameters: int
    longest: int | None
    hidden: int
    layers: int
    vocabulary: int

    @staticmethod
    def of(settings: Mapping[str, Any], num_parameters: int | None) -> ModelShape:
        """Reads the usual names of a Hugging Face config; estimates the parameters where no weights say."""
        inner = settings.get("text_config")
        text: Mapping[str, Any] = inner if isinstance(inner, dict) else settings

        def first(*names: str) -> int:
            return next((int(text[n]) for n in names if isinstance(text.get(n), int)), 0)

        hidden, layers, vocabulary = (
            first("hidden_size", "n_embd", "dim"),
            first("num_hidden_layers", "n_layer", "n_layers"),
            first("vocab_size"),
        )
        estimate = 12 * layers * hidden**2 + vocabulary * hidden
        return ModelShape(
            num_parameters or estimate, _longest(settings.get("model_type"), first), hidden, layers, vocabulary
        )


def _longest(model_type: object, first: Any) -> int | None:
    longest = first("max_position_embeddings", "n_positions", "n_ctx") or None
    if side := first("image_size"):
        return int((side // max(1, first("patch_size"))) ** 2 + 1)  # patches and the class token (ViT)
    # RoBERTa's positions begin after the padding index: 514 rows are 512 positions (modeling_roberta.py).
    return longest - 2 if longest and model_type in ("roberta", "xlm-roberta", "camembert", "longformer") else longest


@dataclass(frozen=True)
class Plan:
    """One run, decided. `choices` are for printing."""

    sequence_length: int
    world_size: int
    total: int
    micro: int
    accumulation: int
    precision: str
    zero: int
    choices: tuple[Choice, ...]


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
    zero, why_zero = _zero(config, shape, device, world_size, precision)
    total, micro, accumulation, batch_choices = _batch(config, shape, device, world_size, length, zero)
    choices = [
        *([chosen] if chosen else []),
        Choice("precision", precision, why_precision),
        Choice("engine.zero", zero, why_zero),
        *batch_choices,
    ]
    return Plan(length, world_size, total, micro, accumulation, precision, zero, tuple(choices))


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
        what = f"{world_size} ranks x micro {micro}" if isinstance(micro, int) else f"{world_size} ranks"
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
        return wanted, "as the run file says"
    if device.kind == "cpu":
        return "fp32", "on a CPU"
    if device.has_bf16:
        return "bf16", f"{device.name} has it"
    return (
        ("fp16", f"{device.name} has no bf16; with loss scaling")
        if device.has_fp16
        else ("fp32", f"{device.name} has neither")
    )


def _zero(config: RunConfig, shape: ModelShape, device: Device, world_size: int, precision: str) -> tuple[int, str]:
    lowest = 0 if precision == "fp32" else 1
    needs = {stage: state_bytes(shape.num_parameters, stage, world_size) for stage in range(4)}
    room = int(device.memory * SHARE_FOR_STATE)
    wanted = config.engine.zero
    if wanted != "auto":
        if wanted < lowest:
            # DeepSpeed's plain bf16/fp16 optimizer counts a dummy step in Adam's bias correction.
            return lowest, f"stage 0 in {precision} makes a wrong first update in DeepSpeed; stage 1 does not"
        return int(wanted), "as the run file says"
    for stage in range(lowest, 4):
        if needs[stage] <= room:
            return stage, (
                f"the lowest that fits: {STATE_BYTES} bytes x {shape.num_parameters / 1e6:.1f} M parameters are "
                f"{human_size(needs[stage])} a rank of {human_size(room)} ({SHARE_FOR_STATE:.0%} of {device.name})"
            )
    raise UsageError(
        f"{config.path}: the model's state does not fit at any ZeRO stage: {human_size(needs[3])} a rank at stage 3 on "
        f"{world_size} ranks, {human_size(room)} are there.",
        f"Use at least {math.ceil(needs[0] / room)} devices.",
    )


def state_bytes(num_parameters: int, stage: int, world_size: int) -> int:
    """Bytes of model state a rank holds at a ZeRO stage: weights 2, gradients 2, Adam 12 (arXiv:1910.02054, fig. 1)."""
    split = {0: 0, 1: 12, 2: 14, 3: 16}[stage]
    return int(num_parameters * (STATE_BYTES - split + split / world_size))


def _batch(
    config: RunConfig, shape: ModelShape, device: Device, world_size: int, length: int, zero: int
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
        choices.append(Choice("batch.global", total, f"{DEFAULT_GLOBAL}, to a multiple of {world_size} ranks{times}"))
        if theirs != 1 and micro == "auto":
            micro = total // (world_size * theirs)
            choices.append(Choice("batch.micro", micro, f"{total} / {world_size} ranks{times}"))
    share = total // world_size
    if micro == "auto":
        fits, reason = _largest_micro(shape, device, length, state_bytes(shape.num_parameters, zero, world_size))
        micro = max(size for size in range(1, share + 1) if share % size == 0 and size <= max(1, fits))
        choices.append(Choice("batch.micro", micro, f"the largest divisor of {share} up to {fits}: {reason}"))
    accumulation = share // int(micro)
    choices.append(Choice("accumulation", accumulation, f"{total} = {world_size} ranks x {micro} x {accumulation}"))
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
