"""The memory of a node: how much the processes of a job may use, and what loading a model takes.

Rank 0 maps the files and hands out weight by weight (runner.training.weights). So a node holds what
its ranks keep, one weight per rank on its way, and on rank 0's node what cannot be mapped.
"""

from __future__ import annotations

import json
import math
import os
import resource
from collections.abc import Iterator, Mapping
from pathlib import Path

from runner.config.run_config import RunConfig
from runner.from_stage import UsageError, human_size
from runner.job.memory import frozen_bytes, leaves_device, model_state
from runner.job.plan import TrainingPlan
from runner.job.shapes import Device, ModelShape


def host_memory(environ: Mapping[str, str]) -> int:
    """Returns the bytes of this node's memory that the processes of this job may use.

    It is the smallest limit of the machine, the cgroups and Slurm.
    """
    cgroups = [limit for limit, _ in _cgroups()]
    return min([machine_memory(), *cgroups, *_limits_of_slurm(environ)])


def machine_memory() -> int:
    """Returns the bytes of this machine's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def is_limited(environ: Mapping[str, str]) -> bool:
    """Whether the processes of this job may use less than all memory of this machine."""
    address_space = resource.getrlimit(resource.RLIMIT_AS)[0]
    return host_memory(environ) < machine_memory() or address_space != resource.RLIM_INFINITY


def free_on_machine() -> list[int]:
    """Returns the bytes of this machine's memory that are free; nothing where Linux is not."""
    try:
        return [_lines_of(Path("/proc/meminfo"))["MemAvailable"]]
    except (OSError, KeyError):
        return []


def data_limit(ranks: int, environ: Mapping[str, str]) -> int:
    """Returns the `RLIMIT_DATA` that keeps this rank in its share of what is free, less a tenth.

    What is free: on this machine, in the cgroups, of what Slurm gives, and under `ulimit -v` and
    `-d`. The share comes to what the rank has already, so the limit is never below that. It counts
    private memory that can be written, which is what torch allocates.

    Args:
        ranks: how many on this node take their share at this moment.
    """
    status = _lines_of(Path("/proc/self/status"))
    free = [size // ranks for size in (*free_on_machine(), *(free for _, free in _cgroups()))]
    free += [limit // ranks - status["VmRSS"] for limit in _limits_of_slurm(environ)]
    for kind, used in (
        (resource.RLIMIT_AS, status["VmSize"]),
        (resource.RLIMIT_DATA, status["VmData"]),
    ):
        soft = resource.getrlimit(kind)[0]
        free += [soft - used] if soft != resource.RLIM_INFINITY else []
    return status["VmData"] + max(0, min(free)) * 9 // 10


def _limits_of_slurm(environ: Mapping[str, str]) -> list[int]:
    """Returns the bytes that Slurm gives a job on each node.

    Slurm's variables are in MB; 0 means all memory of the node.
    """
    total, each = environ.get("SLURM_MEM_PER_NODE", ""), environ.get("SLURM_MEM_PER_CPU", "")
    cpus = environ.get("SLURM_CPUS_ON_NODE", "")
    if total.isdigit() and int(total):
        return [int(total) * 2**20]
    return (
        [int(each) * int(cpus) * 2**20] if each.isdigit() and cpus.isdigit() and int(each) else []
    )


def _cgroups() -> Iterator[tuple[int, int]]:
    """The limit and the free memory (bytes) of the cgroups of this process and their parents.

    Version 2 has the limit in `memory.max`, version 1 in `memory.limit_in_bytes`. The kernel takes
    the memory of cached files back before it kills.
    """
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = Path("/sys/fs/cgroup", "memory" if controllers else "")
        names = ("limit_in_bytes", "usage_in_bytes") if controllers else ("max", "current")
        own = root / path.lstrip("/")
        for folder in (own, *own.parents):
            if folder.is_relative_to(root):
                limit, used = (_number_in(folder / f"memory.{name}") for name in names)
                if limit is not None:
                    yield limit, limit - (used or 0) + _cached(folder / "memory.stat")


def _cached(path: Path) -> int:
    """The bytes of cached files of a cgroup; version 1 has those of its children in `total_...`."""
    try:
        lines = _lines_of(path)
    except OSError:
        return 0
    found = (
        lines.get(f"total_{name}", lines.get(name, 0)) for name in ("inactive_file", "active_file")
    )
    return sum(found)


def _lines_of(path: Path) -> dict[str, int]:
    """The numbers (bytes) in a file of Linux with a name and a size on each line."""
    fields = (line.split() for line in path.read_text(encoding="utf-8").splitlines())
    return {
        name.rstrip(":"): int(size) * (1024 if unit else 1)
        for name, size, *unit in (few for few in fields if len(few) in (2, 3))
        if size.isdecimal() and unit in ([], ["kB"])
    }


def _number_in(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="utf-8").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


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
