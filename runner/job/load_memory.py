"""Whether a node has the memory that the weights take while a model is loaded. Pure.

Rank 0 maps the files and hands out weight by weight (runner.training.weights). So a node holds what
its ranks keep, one weight per rank on its way, and on rank 0's node what cannot be mapped.
"""

from __future__ import annotations

import json
import math

from runner.config.run_config import RunConfig
from runner.errors import UsageError, human_size
from runner.job.memory import frozen_bytes, leaves_device, model_state
from runner.job.plan import TrainingPlan
from runner.job.shapes import Device, ModelShape

LEAST_MB = 1000
"""What Python, torch and transformers take per rank, before a model is loaded."""


def peak_at_load(
    config: RunConfig, shape: ModelShape, plan: TrainingPlan, device: Device, ranks: int
) -> int:
    """Returns the bytes of weights that the node of rank 0 holds at most while it loads.

    Mapped files do not count: the kernel takes their memory back at any time. Nor do Python, its
    libraries and the optimizer.

    Args:
        config: the run file.
        shape: the model's counts.
        plan: precision and what the ranks partition.
        device: the device of each rank.
        ranks: number of ranks on the node.
    """
    largest = 4 * max(
        shape.vocabulary * shape.hidden, shape.num_parameters // max(1, shape.layers) // 3
    )
    is_host = device.kind == "cpu"
    if config.quantization is not None:  # each rank reads and quantises, weight by weight
        return ranks * (largest + (_model(config, shape, plan) if is_host else 0))
    on_way = largest * (ranks if is_host else 1)
    # The weights stay in the node's memory, beside the GPU.
    moves = plan.zero == 3 and leaves_device(config, plan.offload)[1]
    made = 0
    if config.model.init == "scratch":
        made = 4 * shape.num_parameters
    elif config.lora is not None:  # rank 0 converts them all, then adds the matrices
        made = int(frozen_bytes(config, shape)) + 4 * (shape.num_trained or 0)
    return on_way + max(made, _kept(config, shape, plan, ranks) if is_host or moves else 0)


def check_at_load(
    config: RunConfig, shape: ModelShape, plan: TrainingPlan, device: Device, ranks: int
) -> None:
    """Refuses a model that does not fit into the node's memory: while it is loaded, or offloaded.

    Raises:
        UsageError: they do not; says how much is needed.
    """
    has = ranks * (device.memory if device.kind == "cpu" else device.host_memory)
    asked = str(config.slurm.options.get("mem", ""))
    if asked.isdecimal() and 0 < int(asked) < LEAST_MB * ranks:
        raise UsageError(
            f"{config.path}: slurm.options: mem: {asked} is {asked} MB (sbatch reads a number "
            "without a unit as megabytes): Slurm kills the job while torch is imported.",
            f"Write mem: {asked}G, if these are gigabytes.",
        )
    peak = peak_at_load(config, shape, plan, device, ranks)
    what = f"the node of rank 0 holds up to {human_size(peak)} of weights while the model is loaded"
    kept = _offloaded(config, shape, plan, ranks) if device.kind != "cpu" else 0
    if kept > peak:
        peak, what = kept, f"offload keeps {human_size(kept)} of model state on each node"
    if not has or peak <= has:
        return
    needed = math.ceil(1.1 * peak / 2**30) + ranks  # Python and its libraries: about 1 GiB per rank
    options = {k: v for k, v in config.slurm.options.items() if not k.startswith("mem")}
    options["mem"] = f"{needed}G"
    limit = f" ({device.limit})" if device.limit else ""
    spread = ", or use more nodes" if plan.zero or plan.offload != "none" else ""
    raise UsageError(
        f"{config.path}: {what}; the job has {human_size(has)} of memory per node{limit}.",
        f"Ask for more: slurm.options: {json.dumps(options)}, on nodes that have it "
        f"(sinfo -o '%P %n %m'){spread}.",
    )


def _offloaded(config: RunConfig, shape: ModelShape, plan: TrainingPlan, ranks: int) -> int:
    """Returns the bytes of model state in a node's memory: what `offload: cpu` moves there."""
    if plan.offload != "cpu" or not plan.zero:
        return 0
    whole = model_state(config, shape, 0, 1)
    moved = whole - model_state(config, shape, plan.zero, 1, plan.offload)
    return moved * ranks // plan.world_size


def _kept(config: RunConfig, shape: ModelShape, plan: TrainingPlan, ranks: int) -> int:
    """Returns the bytes of weights that the ranks of a node keep."""
    whole = _model(config, shape, plan)
    is_shared = plan.zero == 3 or config.engine.name == "fsdp"
    return whole * ranks // plan.world_size if is_shared else whole * ranks


def _model(config: RunConfig, shape: ModelShape, plan: TrainingPlan) -> int:
    """Returns the bytes of one copy of the model, as the engine keeps it."""
    if shape.num_trained is not None:
        return int(frozen_bytes(config, shape)) + 4 * shape.num_trained
    is_low = config.engine.name == "deepspeed" and plan.precision != "fp32"
    return (2 if is_low else 4) * shape.num_parameters
