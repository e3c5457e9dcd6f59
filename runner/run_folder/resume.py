"""The rules by which a run resumes from a checkpoint: what must be as it was.

The launcher compares what is known without a device; the ranks compare everything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from runner.config.run_config import RunConfig
from runner.errors import OTHER_RUN
from runner.from_stage import UsageError, human_count
from runner.inputs import Inputs
from runner.run_folder.training_state import TrainingState, by_step_newest_first, read_state

MAY_BE_ABSENT = ("lora", "quantization")
"""Keys of a signature that are absent if the feature is not used."""
_START_AGAIN = f"start again: give the run {OTHER_RUN}"


def signature(config: RunConfig, inputs: Inputs, data: str, total: int | None) -> dict[str, Any]:
    """What must stay equal from a run's first step to its last.

    Args:
        data: the key of the training store.
        total: sequences per step; None if that is not decided yet.
    """
    model = inputs.model
    weights = [item for item in sorted(model.digests.items()) if item[0].endswith(".safetensors")]
    version = model.commit or sha256(repr(weights).encode()).hexdigest()[:12]
    known = {
        "task": config.task,
        "model": f"{model.source}@{version}",
        "init": config.model.init,
        "data": data,
        "batch.global": total,
        "seed": config.seed,
        "optimizer": config.optimizer.kind,
        "lora": config.lora.describe() if config.lora else None,
        "quantization": config.quantization.describe() if config.quantization else None,
    }
    return {key: value for key, value in known.items() if value is not None}


def check_resumable(found: TrainingState, now: TrainingState, folder: Path) -> None:
    """Checks that a checkpoint belongs to this run.

    Args:
        found: the state of the checkpoint.
        now: the state of this run.
        folder: the checkpoint, for the message.

    Raises:
        UsageError: names the first difference, both values, and what to do.
    """
    _check_engine(found, now.engine, now.zero, folder)
    _check_ranks(found, now.engine, now.world_size, now.zero, folder)
    _check_signature(found, now.precision, now.signature, folder)


def _check_signature(
    found: TrainingState,
    precision: str,
    now: Mapping[str, Any],
    folder: Path,
    data: Sequence[str] = (),
) -> None:
    before = {**found.signature, "precision": found.precision}
    for key, value in {"precision": precision, **dict.fromkeys(MAY_BE_ABSENT), **now}.items():
        if before.get(key) == value:
            continue
        if key == "data" and data:
            raise UsageError(
                f"{folder}: this checkpoint was made with {'; '.join(data)}.",
                f"Use the same data, or {_START_AGAIN}.",
            )
        raise _not_this_run(folder, key, before.get(key), value)


def _check_engine(found: TrainingState, engine: str, zero: int | None, folder: Path) -> None:
    """DDP and FSDP2 read each other's checkpoints on any number of ranks; DeepSpeed only its own.

    ZeRO 1 and 2 partition the same state, so they read each other's too. Stages 0 and 3 keep it in
    other shapes.
    """
    native = ("ddp", "fsdp")
    if found.engine != engine and not (found.engine in native and engine in native):
        raise _not_this_run(folder, "engine.name", found.engine, engine)
    if (
        engine == "deepspeed"
        and zero is not None
        and found.zero != zero
        and not {found.zero, zero} <= {1, 2}
    ):
        raise _not_this_run(folder, "zero", found.zero, zero)


def _check_ranks(
    found: TrainingState, engine: str, world_size: int | None, zero: int | None, folder: Path
) -> None:
    """DeepSpeed must convert a partitioned checkpoint for other ranks or another stage.

    The conversion knows only AdamW's two moments of a whole model (ds_to_universal.py, 0.19). At
    stage 0 each rank holds everything, so any number of ranks can read it.
    """
    as_it_was = world_size in (None, found.world_size) and zero in (None, found.zero)
    if engine != "deepspeed" or found.zero == 0 or as_it_was:
        return
    optimizer, lora = found.signature.get("optimizer", "adamw"), found.signature.get("lora")
    if optimizer == "adamw" and lora is None:
        return
    what = f"a checkpoint of {optimizer}" if optimizer != "adamw" else "a checkpoint of LoRA"
    raise UsageError(
        f"{folder}: DeepSpeed does not convert {what} for other ranks or another stage; it was "
        f"written by {human_count(found.world_size, 'rank')} at stage {found.zero}.",
        f"Resume with {human_count(found.world_size, 'rank')} and `engine.zero: {found.zero}`; or "
        "start again with engine.name: fsdp or ddp, which resume on any number of ranks.",
    )


def check_before_launch(
    checkpoints: Path,
    now: dict[str, Any],
    world_size: int | None,
    steps: int | None,
    engine: str = "deepspeed",
    precision: str = "auto",
    data: Sequence[str] = (),
    length: str = "",
) -> str | None:
    """Checks in the launcher, within a second, what it can know of `check_resumable`.

    Args:
        now: the known part of the run's `signature`.
        world_size: the number of ranks; None: not known.
        steps: the number of steps; None: not known.
        precision: `auto` if only the ranks will know.
        data: descriptions of how the data of the earlier run differ; the key of its store is a
            hash, which explains nothing to a person.
        length: `KEY=VALUE` of the setting that decided the steps of the earlier run; empty: none.

    Returns:
        A line on the checkpoint from which the run will resume; None if there is none.

    Raises:
        UsageError: as `check_resumable` and `check_not_past_the_end`.
    """
    for folder in by_step_newest_first(checkpoints):
        try:
            found = read_state(folder)
        except (OSError, ValueError):  # the ranks name it and skip it
            continue
        known = found.precision if precision == "auto" else precision
        both = {key: now[key] for key in now if key in (*found.signature, *MAY_BE_ABSENT)}
        _check_signature(found, known, both, folder, data)
        _check_engine(found, engine, None, folder)
        _check_ranks(found, engine, world_size, None, folder)
        if steps is not None:
            check_not_past_the_end(found.step, steps, folder, length)
        ranks = ""
        if world_size not in (None, found.world_size):
            ranks = f", written by {human_count(found.world_size, 'rank')}"
        return f"resumes from {folder.name} of {checkpoints}{ranks}, if it is whole"
    return None


def check_not_past_the_end(done: int, asked: int, folder: Path, length: str = "") -> None:
    """Checks that a run asks for at least as many steps as it has done.

    Args:
        done: its steps.
        asked: the steps of the run file.
        folder: of the checkpoint.
        length: as for `check_before_launch`.

    Raises:
        UsageError: it asks for fewer; with both numbers.
    """
    if done > asked:
        raise UsageError(
            f"{folder}: this run has done {done} steps; now {asked} are asked for.",
            f"{f'Continue it as it was: --set {length}; or ask' if length else 'Ask'} for {done} "
            f"steps or more (--set steps={done}), or {_START_AGAIN}.",
        )


def _not_this_run(folder: Path, key: str, before: object, after: object) -> UsageError:
    more = "."
    if key in ("engine.name", "zero"):
        more = "; `model.init` may be the model/ folder that this run exports."
    return UsageError(
        f"{folder}: this checkpoint was made with {key} {before}; the run now has {after}.",
        f"Resume with {key} {before}, or {_START_AGAIN}{more}",
    )
