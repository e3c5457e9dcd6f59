"""What a run takes of a rank's device: a formula for state and activations. Pure.

(run file, model's shape, device, number of ranks) -> bytes per ZeRO stage. A run whose state does
not fit is refused with a setting that would fit. The activations are a first guess: where
`batch.micro` is automatic, the first step shows whether it fits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from runner.config.ds_config import OFFLOADS
from runner.config.engine import OPTIMIZERS
from runner.config.run_config import RunConfig
from runner.from_stage import UsageError, human_count, human_size
from runner.job.shapes import Device, ModelShape, human_parameters

# Bytes per parameter of weights and gradients that every engine keeps for its own: DeepSpeed in 16
# bits has 16-bit weights, sums of gradients in float32 and a float32 copy of the weights (ZeRO,
# arXiv:1910.02054, 3.1, with wider gradients); otherwise weights and gradients are float32.
WIDE = 4
# Bytes per parameter that the optimizer's moments take on the device.
MOMENT_BYTES = {
    "adamw": 8,
    "lion": 4,
    "sgd": 4,
    "adafactor": 0,
    "adamw_8bit": 2,
    "paged_adamw_8bit": 0,
}
SHARE_FOR_STATE = 0.7  # of a device's memory; the rest is for activations and fragmentation
# Of a GPU's memory. The rest is for the CUDA context, NCCL's buffers, buckets of gradients,
# workspaces of cuBLAS and cuDNN, and fragmentation.
USABLE = 0.9
# Bytes of activations per token, layer and unit of width: 34 (Korthikanti et al.,
# arXiv:2205.05198, eq. 2, without the attention map, which SDPA does not keep), and what is kept
# in float32 or by gated layers: 36 to 66 were measured in 16 bits, 70 to 103 in float32.
ACTIVATIONS, ACTIVATIONS_FP32 = 50, 85
# Bytes of the logits that are held at a time, with their softmax and gradient in float32
# (LOGITS_AT_ONCE of runner.training.components.language).
LOGITS = 12 * 2**26
MICRO_UNKNOWN = 32  # the first steps show whether it fits; it is halved until it does
# Times a GPU's memory. An estimated need above it is refused; below it, it is a warning. Of seven
# models, the estimate was mostly 0.75 to 2 times what was measured.
SURELY_TOO_MUCH = 3
GATHERED = 1_000_000_000  # the most weights that DeepSpeed gathers (stage3_max_live_parameters)


def check_fits(
    config: RunConfig,
    needs: Mapping[int, int],
    shape: ModelShape,
    device: Device,
    world_size: int,
    zero: int,
) -> None:
    """Refuses a run only if it certainly does not fit: the state alone is larger than the memory.

    Args:
        config: the run file.
        needs: ZeRO stage -> bytes of state per rank.
        shape: the model's counts.
        device: the device of each rank.
        world_size: number of ranks.
        zero: the chosen ZeRO stage.

    Raises:
        UsageError: it does not fit; the message says which setting would fit.
    """
    if needs[zero] > device.memory:
        how = (
            f"at ZeRO stage {zero}"
            if config.engine.name == "deepspeed"
            else f"with {config.engine.name}"
        )
        raise too_large(config, needs[zero], device.memory, how, shape, device, world_size)


def too_large(
    config: RunConfig,
    need: int,
    available: int,
    how: str,
    shape: ModelShape,
    device: Device,
    world_size: int,
) -> UsageError:
    """Returns the error for a model that does not fit, with a setting that would fit.

    Args:
        config: the run file.
        need: bytes that a rank needs.
        available: bytes that a rank has.
        how: under which setting it does not fit.
        shape: the model's counts.
        device: the device of each rank.
        world_size: number of ranks.
    """
    limit = f" ({device.limit})" if device.limit and device.kind == "cpu" else ""
    return UsageError(
        f"{config.place('engine')}: "
        f"the model's state does not fit {how}: {human_size(need)} per rank on "
        f"{human_count(world_size, 'rank')}, "
        f"{human_size(available)} are available on {device.name}{limit}.",
        would_fit(config, shape, device, world_size),
    )


def would_fit(config: RunConfig, shape: ModelShape, device: Device, world_size: int) -> str:
    """Returns what to set so that the model's state fits. Pure.

    It tries the stages without offload first, then with offload, then more devices.
    """
    also = ""
    if "deepspeed" not in OPTIMIZERS[config.optimizer.name]:
        also = ", and optimizer.name: adamw"
        config = replace(config, optimizer=replace(config.optimizer, name="adamw"))
    available = int(device.memory * SHARE_FOR_STATE)
    on_host = _trained(shape) * sum(state_parts(config)) // world_size
    for offload in ("none", "cpu"):
        if offload == "cpu" and (
            device.kind == "cpu" or config.optimizer.name not in ("adamw", "lion", "sgd")
        ):
            continue
        for zero in (1, 2) if config.quantization else (1, 2, 3):
            need = model_state(config, shape, zero, world_size, offload)
            # At stage 3 the weights that LoRA does not train go to the host as well.
            host = on_host + (int(frozen_bytes(config, shape)) // world_size if zero == 3 else 0)
            has_host = not device.host_memory or host <= device.host_memory * SHARE_FOR_STATE
            if need <= available and (offload == "none" or has_host):
                beside = (
                    f", and {human_size(host)} of the node's memory" if offload == "cpu" else ""
                )
                spread = _how_to_spread(config, zero, offload)
                return f"{spread}{also}: {human_size(need)} per rank{beside}."
    if config.quantization:
        return "Use devices with more memory: each holds all quantised weights."
    if shape.num_trained is not None:
        if "engine.zero" in config.theirs or "engine.offload" in config.theirs:
            return "Use more devices, or devices with more memory."
        return (
            "Add `quantization: {bits: 4}` with engine: {name: deepspeed, zero: 2}, "
            "or use more devices."
        )
    least = math.ceil(shape.num_parameters * sum(state_parts(config)) / available)
    if device.kind == "cpu":
        return (
            "Give the job more memory (mem in slurm.options), or use at least "
            f"{least} ranks that have as much each."
        )
    return f"Use at least {least} devices."


def _how_to_spread(config: RunConfig, zero: int, offload: str) -> str:
    if config.engine.config is None:
        return f"Set engine: {{name: deepspeed, zero: {zero}" + (
            ", offload: cpu}" if offload == "cpu" else "}"
        )
    settings = [config.how_to_set("engine.zero", zero)]
    if config.engine.offload != offload:
        settings.append(config.how_to_set("engine.offload", offload))
    return "; ".join(settings)


def state_needed(config: RunConfig, shape: ModelShape, world_size: int) -> dict[int, int]:
    """Returns ZeRO stage -> bytes of model state on each rank's device, for this run's settings.

    A quantised model has no stage 3: its packed bytes cannot be partitioned as weights.
    """
    stages = range(3 if config.quantization else 4)
    return {
        zero: model_state(config, shape, zero, world_size, config.engine.offload) for zero in stages
    }


def model_state(
    config: RunConfig, shape: ModelShape, zero: int, world_size: int, offload: str = "none"
) -> int:
    """Returns the bytes of model state on each rank's device (arXiv:1910.02054, fig. 1).

    Trained weights count with gradients and moments, all other weights count alone.

    Args:
        config: the run file.
        shape: the model's counts.
        zero: what the ranks partition, as a ZeRO stage, for every engine.
        world_size: number of ranks.
        offload: where what is partitioned is; see `leaves_device`.
    """
    weights, gradients, optimizer = state_parts(config)
    updates, parameters = leaves_device(config, offload)
    share = 1 / world_size
    # What each part takes of its bytes: all of them, this rank's share, or nothing.
    of_weights = (0.0 if parameters else share) if zero == 3 else 1.0
    of_updates = 0.0 if updates else share
    per_parameter = weights * of_weights
    per_parameter += gradients * (of_updates if zero >= 2 else 1.0)
    per_parameter += optimizer * (of_updates if zero >= 1 else 1.0)
    return int(_trained(shape) * per_parameter) + int(frozen_bytes(config, shape) * of_weights)


def leaves_device(config: RunConfig, offload: str) -> tuple[bool, bool]:
    """Returns whether the optimizer's part (with the gradients), and at stage 3 the weights, leave
    the device.

    A ds_config.json may offload one of the two alone.

    Args:
        config: the run file.
        offload: `none`, `cpu` or `nvme`; another one than the run file's is a trial of both.
    """
    theirs = config.deepspeed.get("zero_optimization", {})
    if offload == config.engine.offload and any(name in theirs for name in OFFLOADS):
        halves = [theirs.get(name, {}).get("device", "none") != "none" for name in OFFLOADS]
        return halves[0], halves[1]
    return offload != "none", offload != "none"


def _trained(shape: ModelShape) -> int:
    return shape.num_parameters if shape.num_trained is None else shape.num_trained


def frozen_bytes(config: RunConfig, shape: ModelShape) -> float:
    """Returns the bytes of the weights that LoRA does not train; 0: all are trained."""
    if shape.num_trained is None:
        return 0
    quantized = shape.num_quantized * (config.quantization.bytes_each if config.quantization else 0)
    return quantized + (shape.num_parameters - shape.num_quantized) * frozen_width(config)


def frozen_width(config: RunConfig) -> int:
    """Returns the bytes of a weight that is neither trained nor quantised.

    FSDP2 needs one width for all weights, the other engines do not.
    """
    return 4 if config.precision == "fp32" or config.engine.name == "fsdp" else 2


def describe_state(config: RunConfig, shape: ModelShape) -> str:
    """Describes the parts of a model's state."""
    each = sum(state_parts(config))
    if shape.num_trained is None:
        return f"{each} bytes x {human_parameters(shape.num_parameters)}"
    return (
        f"{each} bytes x {human_parameters(shape.num_trained)} that are trained and "
        f"{human_size(int(frozen_bytes(config, shape)))} that are not"
    )


def state_parts(config: RunConfig) -> tuple[int, int, int]:
    """Returns the bytes per trained parameter: weights, gradients, and what the optimizer keeps."""
    optimizer = config.optimizer
    moments = MOMENT_BYTES[optimizer.name]
    if optimizer.name == "sgd" and not optimizer.momentum:
        moments = 0
    if config.engine.name == "deepspeed" and config.precision != "fp32":
        return 2, WIDE, WIDE + moments
    return WIDE, WIDE, moments


def activation_bytes(
    config: RunConfig, shape: ModelShape, length: int, zero: int
) -> tuple[int, int]:
    """Estimates what a micro batch takes on a rank's GPU beside the model's state.

    Args:
        config: the run file, with its precision decided.
        shape: the model's counts.
        length: tokens per sequence.
        zero: what the ranks partition, as a ZeRO stage.

    Returns:
        Bytes of any micro batch, and bytes per sequence (0: not known for such a model).
    """
    width, layer = (4, ACTIVATIONS_FP32) if config.precision == "fp32" else (2, ACTIVATIONS)
    layers = layer * shape.layers
    if config.activation_checkpointing:  # inputs of layers, and one whole layer
        layers = layer + 2 * shape.layers
    casts = config.engine.name == "ddp" and width == 2  # autocast has a copy of the weights
    copies = width * min(shape.num_parameters, GATHERED) if casts or zero == 3 else 0
    return copies + min(LOGITS, 12 * length * shape.vocabulary), length * shape.hidden * layers


def largest_micro(
    config: RunConfig, shape: ModelShape, device: Device, length: int, zero: int, state: int
) -> tuple[int, str]:
    """Estimates how many sequences fit on a GPU beside `state` bytes, and says why."""
    fixed, each = activation_bytes(config, shape, length, zero)
    if not each:
        return MICRO_UNKNOWN, "the activations of such a model are not known"
    available = max(0, int(device.memory * USABLE) - state - fixed)
    fits = available // each
    why = f"about {human_size(each)} of activations per sequence in {human_size(available)}"
    if not fits:
        why += "; not even one seems to fit: shorten sequence_length"
        if not config.activation_checkpointing:
            why += ", or set activation_checkpointing: true"
    return fits, why
