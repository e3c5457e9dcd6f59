"""What of a model's state falls to a rank, in bytes, and whether it fits. Pure.

(run file, model's shape, device, ranks) -> bytes by ZeRO stage; what does not fit is refused with what would.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from runner.config import RunConfig
from runner.errors import UsageError, human_count, human_size
from runner.shapes import Device, ModelShape

# Mixed-precision Adam: 2 + 2 bytes of weights and gradients, 4 + 4 + 4 of fp32 copy and moments (ZeRO,
# arXiv:1910.02054, 3.1). In fp32 there is no copy: 4 + 4 + 4 + 4. Both are 16.
STATE_BYTES = 16
# Of these, an optimizer's moments on the device.
MOMENT_BYTES = {"adamw": 8, "lion": 4, "adafactor": 0, "adamw_8bit": 2, "paged_adamw_8bit": 0}
SHARE_FOR_STATE = 0.7  # of a device's memory; the rest is for activations and fragmentation


def check_fits(
    config: RunConfig, needs: Mapping[int, int], shape: ModelShape, device: Device, world_size: int, stage: int
) -> None:
    """Refuses only what certainly does not fit: the state alone is more than there is.

    Raises:
        UsageError: with what would fit.
    """
    if needs[stage] > device.memory:
        how = f"at ZeRO stage {stage}" if config.engine.name == "deepspeed" else f"with {config.engine.name}"
        raise too_large(config, needs[stage], device.memory, how, shape, device, world_size)


def too_large(
    config: RunConfig, need: int, room: int, how: str, shape: ModelShape, device: Device, world_size: int
) -> UsageError:
    """The refusal of what does not fit, with what would."""
    return UsageError(
        f"{config.path}: the model's state does not fit {how}: {human_size(need)} a rank on "
        f"{human_count(world_size, 'rank')}, "
        f"{human_size(room)} are there on {device.name}.",
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
    least = math.ceil(shape.num_parameters * state_bytes_each(config) / room)
    if device.kind == "cpu":
        return f"Give the job more memory, or use at least {least} ranks that have as much each."
    return f"Use at least {least} devices."


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
