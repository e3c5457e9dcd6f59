"""What a rehearsal changes about a run: fewer rows, a small batch, two steps, no GPU.

Run -> the run that is rehearsed, with the reason of each change. All else stays: task, engine,
LoRA, optimizer, sequence length, tokenizer, ds_config.json.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from runner.child import in_child
from runner.config.fields import Choice
from runner.config.run_config import RunConfig
from runner.data.recipe import Recipe
from runner.errors import keys_of
from runner.inputs import ModelInput
from runner.job.host_memory import free_on_machine, host_memory
from runner.job.looks import count_parameters
from runner.job.memory import state_needed
from runner.job.shapes import Device
from runner.job.texts import bytes_of_text
from runner.job.training_run import TrainingRun
from runner.run_folder.layout import RunFolder

RANKS = 2
STEPS = 2
BYTES_OF_A_TOKEN = 16
"""More than any text has on average, so that the rows that are read fill the sequences."""
ROWS = {"train": 32, "validation": 8}
"""Rows that are read where each is a sample."""
LIBRARIES = 2**30
"""Bytes that Python, torch and its libraries take per rank."""
_AT_A_TIME = 3 * 2**28  # bytes of logits, their gradient and their float32 copy, per rank


class SmallRun(NamedTuple):
    """The run that is rehearsed, and what differs from the user's."""

    run: TrainingRun
    changes: tuple[Choice, ...]


def small_run(run: TrainingRun, hidden: Path, model: ModelInput, zero: int | None) -> SmallRun:
    """Returns the run that is rehearsed, still with all rows.

    The changes are made in the settings that were read, not with `--set`: a ds_config.json with
    another batch or precision would contradict them.

    Args:
        run: the user's.
        hidden: the rehearsal's folder.
        model: the small model.
        zero: the ZeRO stage of the job; None: not known.
    """
    changes = [*_shorter(run.config), *_without_gpus(run.config)]
    engine = run.config.engine
    if engine.name == "deepspeed" and engine.zero == "auto" and zero is not None:
        changes.append(Choice("engine.zero", zero, "what the whole model gets in the job"))
    if run.config.model.folder is not None and model is not run.inputs.model:
        changes.append(Choice("model.init", "pretrained", ""))  # its weights are in the small model
    config = replace(run.config, accumulation=None)
    for choice in changes:
        config = _changed(config, choice.key, choice.value)
    inputs = replace(run.inputs, model=model, environment=None)
    small = replace(run, config=config, inputs=inputs, folder=RunFolder(hidden / "run"))
    return SmallRun(small, tuple(choice for choice in changes if choice.reason))


def _changed(component: Any, key: str, value: object) -> Any:
    """A component of a run file with another value at a dotted key."""
    first, _, rest = key.partition(".")
    name = keys_of(type(component))[first].field
    if rest:
        value = _changed(getattr(component, name), rest, value)
    return replace(component, **{name: value})


def _shorter(config: RunConfig) -> list[Choice]:
    """Two steps of two ranks, each with its checkpoint. What has no reason follows from these."""
    return [
        Choice("batch.global", RANKS, f"{RANKS} ranks, one sequence each"),
        Choice("batch.micro", 1, ""),
        Choice("steps", STEPS, "one, a checkpoint, and one after the resume"),
        Choice("epochs", None, ""),
        Choice("environment", None, ""),
        Choice("hang_after", "auto", ""),
        Choice("checkpoint.every", 1, ""),
        Choice("checkpoint.keep", 1, ""),
        Choice("evaluation.patience", None, ""),
    ]


def _without_gpus(config: RunConfig) -> list[Choice]:
    """Replaces what only a GPU or the node of a job can have."""
    changes = []
    if config.precision in ("auto", "fp16"):
        asked = "" if config.precision == "auto" else f", instead of {config.precision}"
        changes.append(Choice("precision", "fp32", f"on a CPU{asked}"))
    if config.compile:
        changes.append(Choice("compile", False, "it needs the compiler of the nodes"))
    if config.engine.offload == "nvme":
        changes.append(Choice("engine.offload", "cpu", "nvme is a disk of the nodes"))
        changes.append(Choice("engine.nvme_path", None, ""))
    return changes


def with_rows(small: SmallRun, reads: int) -> SmallRun:
    """Limits the rows that are read of each dataset.

    Args:
        small: of `small_run`.
        reads: how many times as many rows are read as should be enough.
    """
    config, inputs = small.run.config, small.run.inputs
    limits: list[dict[str, int]] = [{} for _ in inputs.datasets]
    for role, several in small.run.recipes.items():
        sequences = RANKS * STEPS if role == "train" else RANKS
        for limit, data in zip(limits, inputs.datasets, strict=True):
            for recipe in (r for r in several if r.dataset is data.settings):
                most = recipe.split.rows if recipe.limit is None else recipe.limit
                limit[role] = max(1, min(_rows(recipe, sequences, role) * reads, most))
    sources = tuple(
        replace(source, limit=limit) for source, limit in zip(config.sources, limits, strict=True)
    )
    if config.dataset is not None:
        config = replace(config, dataset=sources[0])
    else:
        config = replace(config, datasets=sources)
    datasets = tuple(
        replace(data, settings=source)
        for data, source in zip(inputs.datasets, sources, strict=True)
    )
    rows = ", ".join(f"{data.settings.limit['train']} of {data.asset}" for data in datasets)
    change = Choice("dataset.limit", rows, "rows that fill these steps")
    limited = replace(small.run, config=config, inputs=replace(inputs, datasets=datasets))
    return SmallRun(limited, (*small.changes, change))


def _rows(recipe: Recipe, sequences: int, role: str) -> int:
    """How many rows should fill so many sequences."""
    if recipe.documents != "joined" or not recipe.split.rows:
        return ROWS[role]
    size = max(1.0, bytes_of_text(recipe) / recipe.split.rows)
    return max(ROWS[role], math.ceil(sequences * recipe.sequence_length * BYTES_OF_A_TOKEN / size))


def counted(run: TrainingRun) -> TrainingRun:
    """Returns a run whose parameters are counted: by transformers, where the model has no weights.

    Raises:
        StageError: as for `shape_of`, or transformers does not build the model.
    """
    if run.shape.num_parameters:
        return run
    what = (run.config, run.config.model.folder or run.inputs.model.path)
    remedy = "Run it where there is more memory."
    return run.given(
        TrainingRun.counted, in_child(count_parameters, what, "counting parameters", remedy)
    )


def memory_needed(run: TrainingRun) -> int:
    """Bytes of this machine's memory that the ranks of a rehearsal need.

    Raises:
        StageError: as for `decide`.
    """
    run = counted(run).on(Device.cpu(2**62), RANKS)
    state = state_needed(run.config, run.shape, RANKS)[run.plan.zero]
    # Rank 0 holds all weights once more while it loads and exports them.
    return RANKS * (state + LIBRARIES + _AT_A_TIME) + 4 * run.shape.num_parameters


def memory_here(environ: Mapping[str, str]) -> int:
    """Bytes of this machine's memory that are free for this user's processes."""
    return min([host_memory(environ), *free_on_machine()])
