"""The arithmetic of a run: what `auto` means for this model on this many devices of this kind. Pure.

(run file, model's shape, device) -> `Plan`: sequence length, batch triple, precision, what is partitioned and what
offloaded, steps, each with the reason that is printed. What cannot be is refused here, with the nearest that can,
before a model is built.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
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
# Of these, an optimizer's moments on the device.
MOMENT_BYTES = {"adamw": 8, "lion": 4, "adafactor": 0, "adamw_8bit": 2, "paged_adamw_8bit": 0}
SHARE_FOR_STATE = 0.7  # of a device's memory; the rest is for activations and fragmentation


@dataclass(frozen=True)
class Device:
    """What one rank has.

    Attributes:
        kind: `cuda` or `cpu`.
        memory: bytes a rank may use.
        has_bf16, has_fp16: whether it computes in them at speed.
        host_memory: bytes of the node's memory that fall to a rank, for what is offloaded; 0: not known.
    """

    kind: str
    name: str
    memory: int
    has_bf16: bool
    has_fp16: bool
    host_memory: int = 0


@dataclass(frozen=True)
class ModelShape:
    """What the arithmetic needs of a model: counts from its config.json and safetensors headers.

    Attributes:
        num_trained: parameters that LoRA trains, beside those of the model; None: all of the model's are trained.
        num_quantized: of the model's parameters, those that are kept quantised.
    """

    num_parameters: int
    longest: int | None
    hidden: int
    layers: int
    vocabulary: int
    num_trained: int | None = None
    num_quantized: int = 0

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
    """One run, decided. `choices` are for printing.

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
    return Plan(length, world_size, total, micro, accumulation, precision, zero, tuple(choices), offload)


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
    _check_fits(config, needs, shape, device, world_size, zero)
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
        _check_fits(config, needs, shape, device, world_size, stage)
        if wanted >= lowest:
            return stage, "as the run file says"
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
    raise _too_large(config, needs[highest], room, f"at any ZeRO stage up to {highest}", shape, device, world_size)


def _check_fits(
    config: RunConfig, needs: Mapping[int, int], shape: ModelShape, device: Device, world_size: int, stage: int
) -> None:
    """Refuses only what certainly does not fit: the state alone is more than there is."""
    if needs[stage] > device.memory:
        how = f"at ZeRO stage {stage}" if config.engine.name == "deepspeed" else f"with {config.engine.name}"
        raise _too_large(config, needs[stage], device.memory, how, shape, device, world_size)


def _too_large(
    config: RunConfig, need: int, room: int, how: str, shape: ModelShape, device: Device, world_size: int
) -> UsageError:
    return UsageError(
        f"{config.path}: the model's state does not fit {how}: {human_size(need)} a rank on {world_size} ranks, "
        f"{human_size(room)} are there.",
        would_fit(config, shape, device, world_size),
    )


def would_fit(config: RunConfig, shape: ModelShape, device: Device, world_size: int) -> str:
    """What to set so that the model's state fits: a stage without offload, then with, then more devices. Pure."""
    room = int(device.memory * SHARE_FOR_STATE)
    trained = shape.num_parameters if shape.num_trained is None else shape.num_trained
    on_host = trained * state_bytes_each(config) // world_size
    for offload in ("none", "cpu"):
        if offload == "cpu" and (device.kind == "cpu" or config.optimizer.name not in ("adamw", "lion")):
            continue
        for stage in (1, 2) if config.quantization else (1, 2, 3):
            need = model_state(config, shape, stage, world_size, offload)
            # At stage 3 what LoRA leaves as it is goes to the host as well.
            host = on_host + (int(frozen_bytes(config, shape)) // world_size if stage == 3 else 0)
            has_host = not device.host_memory or host <= device.host_memory * SHARE_FOR_STATE
            if need <= room and (offload == "none" or has_host):
                words = f"Set engine: {{name: deepspeed, zero: {stage}" + (", offload: cpu" if offload == "cpu" else "")
                beside = f", and {human_size(host)} of the node's memory" if offload == "cpu" else ""
                return f"{words}}}: {human_size(need)} a rank{beside}."
    if config.quantization:
        return "Use devices with more memory: what is quantised is whole on each."
    if shape.num_trained is not None:
        return "Add `quantization: {bits: 4}` with engine: {name: deepspeed, zero: 2}, or use more devices."
    return f"Use at least {math.ceil(shape.num_parameters * state_bytes_each(config) / room)} devices."


def state_needed(config: RunConfig, shape: ModelShape, world_size: int) -> dict[int, int]:
    """Bytes of model state on a rank's device, by ZeRO stage, for this run's optimizer and offload.

    Packed bytes cannot be partitioned as weights: quantised, there is no stage 3.
    """
    stages = range(3 if config.quantization else 4)
    return {stage: model_state(config, shape, stage, world_size, config.engine.offload) for stage in stages}


def model_state(config: RunConfig, shape: ModelShape, stage: int, world_size: int, offload: str = "none") -> int:
    """Bytes of model state on a rank's device: what is trained with gradients and moments, the rest as it is.

    Args:
        stage: what is partitioned, as a ZeRO stage, whichever engine does it.
        offload: as for `state_bytes`.
    """
    each = state_bytes_each(config)
    if shape.num_trained is None:
        return state_bytes(shape.num_parameters, stage, world_size, each, offload)
    frozen = frozen_bytes(config, shape)
    if stage == 3:
        frozen = 0 if offload != "none" else frozen / world_size
    return state_bytes(shape.num_trained, stage, world_size, each, offload) + int(frozen)


def frozen_bytes(config: RunConfig, shape: ModelShape) -> float:
    """Bytes of the weights that LoRA leaves as they are: 0 where all are trained."""
    if shape.num_trained is None:
        return 0
    quantized = shape.num_quantized * (config.quantization.bytes_each if config.quantization else 0)
    return quantized + (shape.num_parameters - shape.num_quantized) * frozen_width(config)


def frozen_width(config: RunConfig) -> int:
    """Bytes of a weight that is neither trained nor quantised: FSDP2 wants one width for all, the others do not."""
    return 4 if config.precision == "fp32" or config.engine.name == "fsdp" else 2


def state_in_words(config: RunConfig, shape: ModelShape) -> str:
    """What the state of a model is made of."""
    each = state_bytes_each(config)
    if shape.num_trained is None:
        return f"{each} bytes x {shape.num_parameters / 1e6:.1f} M parameters"
    return (
        f"{each} bytes x {shape.num_trained / 1e6:.2f} M parameters that are trained and "
        f"{human_size(int(frozen_bytes(config, shape)))} that are not"
    )


def state_bytes_each(config: RunConfig) -> int:
    """Bytes of model state a parameter: weights and gradients 2 + 2, fp32 weights 4, and the optimizer's moments."""
    return STATE_BYTES - MOMENT_BYTES["adamw"] + MOMENT_BYTES[config.optimizer.name]


def state_bytes(
    num_parameters: int, stage: int, world_size: int, each: int = STATE_BYTES, offload: str = "none"
) -> int:
    """Bytes of model state on a rank's device at a ZeRO stage (arXiv:1910.02054, fig. 1).

    Args:
        each: bytes a parameter: weights 2, gradients 2, the rest is the optimizer's.
        offload: other than `none`: the optimizer's part is not on the device; at stage 3 nothing is, but for a layer.
    """
    split = {0: 0, 1: each - 4, 2: each - 2, 3: each}[stage]
    if offload == "none" or stage == 0:
        return int(num_parameters * (each - split + split / world_size))
    return int(num_parameters * {1: 4.0, 2: 2 + 2 / world_size, 3: 0.0}[stage])


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
        choices.append(Choice("batch.global", total, f"{DEFAULT_GLOBAL}, to a multiple of {world_size} ranks{times}"))
        if theirs != 1 and micro == "auto":
            micro = total // (world_size * theirs)
            choices.append(Choice("batch.micro", micro, f"{total} / {world_size} ranks{times}"))
    share = total // world_size
    if micro == "auto":
        state = model_state(config, shape, zero, world_size, offload)
        fits, reason = _largest_micro(shape, device, length, state)
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
