"""What a rehearsal changes of a run: fewer rows, a small batch, two steps, no GPU.

Run -> the run that is rehearsed, with the reason of each change. All else stays: task, engine,
LoRA, optimizer, sequence length, tokenizer, ds_config.json.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from runner.child import in_child
from runner.config.engine import BatchConfig
from runner.config.fields import Choice
from runner.config.run_config import RunConfig
from runner.data.recipe import Recipe, recipes
from runner.inputs import Inputs, ModelInput
from runner.job.host_memory import free_on_machine, host_memory
from runner.job.job import Job
from runner.job.memory import state_needed
from runner.job.plan import decide, sequence_length
from runner.job.shapes import Device, ModelShape, shape_of
from runner.job.texts import bytes_of_text
from runner.job.with_torch import count
from runner.run_folder.layout import RunFolder

RANKS = 2
STEPS = 2
BYTES_OF_A_TOKEN = 16
"""More than any text has on average, so that the rows that are read fill the sequences."""
ROWS = {"train": 32, "validation": 8}
"""Rows that are read where each is a sample."""
MORE_ROWS = (1, 16, 256)
"""The first rows can be shorter than the others, or too long for a sample: then more are read."""
LIBRARIES = 2**30
"""Bytes that Python, torch and its libraries take per rank."""
_AT_A_TIME = 3 * 2**28  # bytes of logits, their gradient and their float32 copy, per rank


@dataclass(frozen=True)
class SmallRun:
    """The run that is rehearsed, and what differs from the user's."""

    run: Job
    changes: tuple[Choice, ...]


def small_run(
    run: Job, hidden: Path, model: ModelInput, reads: int, zero: int | None = None
) -> SmallRun:
    """Returns the run that is rehearsed.

    Args:
        run: the user's.
        hidden: the rehearsal's folder.
        model: the small model.
        reads: how many times as many rows are read as should be enough.
        zero: the ZeRO stage of the job; None: not known.
    """
    config = run.config
    changes = [Choice("batch.global", RANKS, f"{RANKS} ranks, one sequence each")]
    changes.append(Choice("steps", STEPS, "one, a checkpoint, and one after the resume"))
    config = replace(
        config,
        batch=BatchConfig(total=RANKS, micro=1),
        accumulation=None,
        steps=STEPS,
        epochs=None,
        environment=None,
        hang_after="auto",
        checkpoint=replace(config.checkpoint, every=1, keep=1),
        evaluation=replace(config.evaluation, patience=None),
    )
    if config.model.folder is not None and model is not run.inputs.model:
        config = replace(config, model=replace(config.model, init="pretrained"))
    config, without = _without_gpus(config)
    changes += without
    if config.engine.name == "deepspeed" and config.engine.zero == "auto" and zero is not None:
        config = replace(config, engine=replace(config.engine, zero=zero))  # type: ignore[arg-type]
        changes.append(Choice("engine.zero", zero, "what the whole model gets in the job"))
    limits = _limits(run, reads)
    rows = ", ".join(
        f"{limit['train']} of {data.asset}"
        for limit, data in zip(limits, run.inputs.datasets, strict=True)
    )
    changes.append(Choice("dataset.limit", rows, "rows that fill these steps"))
    config, inputs = _limited(config, run.inputs, model, limits)
    small = Job(config, inputs, RunFolder(hidden / "run"), run.bundle, run.overrides)
    return SmallRun(small, tuple(changes))


def _without_gpus(config: RunConfig) -> tuple[RunConfig, list[Choice]]:
    """Replaces what only a GPU or the node of a job can have."""
    changes = []
    if config.precision in ("auto", "fp16"):
        asked = "" if config.precision == "auto" else f", instead of {config.precision}"
        changes.append(Choice("precision", "fp32", f"on a CPU{asked}"))
        config = replace(config, precision="fp32")
    if config.compile:
        changes.append(Choice("compile", False, "it needs the compiler of the nodes"))
        config = replace(config, compile=False)
    if config.engine.offload == "nvme":
        changes.append(Choice("engine.offload", "cpu", "nvme is a disk of the nodes"))
        config = replace(config, engine=replace(config.engine, offload="cpu", nvme_path=None))
    return config, changes


def _limited(
    config: RunConfig, inputs: Inputs, model: ModelInput, limits: Sequence[dict[str, int]]
) -> tuple[RunConfig, Inputs]:
    several = [
        replace(source, limit=limit) for source, limit in zip(config.sources, limits, strict=True)
    ]
    if config.dataset is not None:
        config = replace(config, dataset=several[0])
    else:
        config = replace(config, datasets=tuple(several))
    datasets = tuple(
        replace(data, settings=settings)
        for data, settings in zip(inputs.datasets, several, strict=True)
    )
    return config, replace(inputs, model=model, datasets=datasets, environment=None)


def _limits(run: Job, reads: int) -> list[dict[str, int]]:
    """`limit` of each dataset: the rows that are read of each split."""
    length, _ = sequence_length(run.config, ModelShape.of(run.inputs.model.settings))
    limits: list[dict[str, int]] = [{} for _ in run.inputs.datasets]
    for role, several in recipes(run.config, run.inputs, length).items():
        sequences = RANKS * STEPS if role == "train" else RANKS
        for limit, data in zip(limits, run.inputs.datasets, strict=True):
            for recipe in (r for r in several if r.dataset is data.settings):
                most = recipe.split.rows if recipe.limit is None else recipe.limit
                limit[role] = max(1, min(_rows(recipe, sequences, role) * reads, most))
    return limits


def _rows(recipe: Recipe, sequences: int, role: str) -> int:
    """How many rows should fill so many sequences."""
    if recipe.documents != "joined" or not recipe.split.rows:
        return ROWS[role]
    size = max(1.0, bytes_of_text(recipe) / recipe.split.rows)
    return max(ROWS[role], math.ceil(sequences * recipe.sequence_length * BYTES_OF_A_TOKEN / size))


def counted_shape(config: RunConfig, model: ModelInput) -> ModelShape:
    """Returns the counts of a run's model; transformers counts where the model has no weights.

    Raises:
        StageError: as for `shape_of`, or transformers does not build the model.
    """
    shape = shape_of(config, model)
    if shape.num_parameters:
        return shape
    what = (config, config.model.folder or model.path)
    remedy = "Run it where there is more memory."
    return shape_of(config, model, in_child(count, what, "counting parameters", remedy))


def memory_needed(config: RunConfig, model: ModelInput) -> int:
    """Bytes of this machine's memory that the ranks of a rehearsal need.

    Raises:
        StageError: as for `decide`.
    """
    shape = counted_shape(config, model)
    plan = decide(config, shape, Device.cpu(2**62), RANKS)
    state = state_needed(config, shape, RANKS)[plan.zero]
    # Rank 0 holds all weights once more while it loads and exports them.
    return RANKS * (state + LIBRARIES + _AT_A_TIME) + 4 * shape.num_parameters


def memory_here(environ: Mapping[str, str]) -> int:
    """Bytes of this machine's memory that are free for this user's processes."""
    return min([host_memory(environ), *free_on_machine()])
