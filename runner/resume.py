"""What a run must know to go on exactly, and what it may not go on from. Pure, but for reading `state.json`.

checkpoints/step-N/state.json -> `TrainingState`. The launcher compares what it can know without a device; the ranks
compare all of it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from runner.config import RunConfig
from runner.errors import UsageError, human_count
from runner.inputs import Inputs

STATE = "state.json"
MAY_BE_ABSENT = ("lora", "quantization")  # of a signature; what is absent was not used


@dataclass(frozen=True)
class TrainingState:
    """What a run must know besides weights and optimizer to go on exactly.

    Attributes:
        step: optimizer steps done. Order, masks, dropout and rate all follow from it and the seed.
        zero: the ZeRO stage that wrote it.
        engine: what wrote it.
        signature: what has to be the same when it is read: model, data, batch, seed.
        evaluation_due: a stop signal came before the evaluation that belongs to this step.
    """

    step: int
    world_size: int
    zero: int
    precision: str
    signature: dict[str, Any]
    evaluation_due: bool = False
    engine: str = "deepspeed"


def read_state(folder: Path) -> TrainingState:
    """The state of the checkpoint in `folder`.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not a state this version knows.
    """
    try:
        document = json.loads((folder / STATE).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{STATE}: {error}") from None
    names = {field.name for field in dataclasses.fields(TrainingState)}
    if not isinstance(document, dict) or set(document) - names:
        raise ValueError(f"{STATE} is of another version")
    try:
        return TrainingState(**document)
    except TypeError as error:
        raise ValueError(f"{STATE} is of another version: {error}") from None


def newest_first(checkpoints: Path) -> list[Path]:
    """Finished checkpoints, the newest first."""
    found = [p for p in checkpoints.glob("step-*") if p.is_dir() and p.name.removeprefix("step-").isdecimal()]
    return sorted(found, key=lambda p: -int(p.name.removeprefix("step-")))


def signature(config: RunConfig, inputs: Inputs, data: str, total: int | None) -> dict[str, Any]:
    """What has to be the same from a run's first step to its last.

    Args:
        data: the key of the training store.
        total: sequences a step; None where that is not decided yet.
    """
    known = {
        "task": config.task,
        "model": f"{inputs.model.source}@{inputs.model.commit}",
        "init": config.model.init,
        "data": data,
        "batch.global": total,
        "seed": config.seed,
        "optimizer": config.optimizer.name,
        "lora": config.lora.words if config.lora else None,
        "quantization": config.quantization.words if config.quantization else None,
    }
    return {key: value for key, value in known.items() if value is not None}


def check_resumable(found: TrainingState, now: TrainingState, folder: Path) -> None:
    """Refuses to go on from a checkpoint of something else.

    Raises:
        UsageError: naming the first thing that differs, both values, and the ways out.
    """
    before = {**asdict(found), **found.signature}
    after = {**asdict(now), **now.signature}
    _check_engine(found, now.engine, now.zero, folder)
    _check_ranks(found, now.engine, now.world_size, now.zero, folder)
    for key in ("precision", *now.signature):
        if before.get(key, after[key]) != after[key]:  # an older version did not note every key
            raise _not_this_run(folder, key, before.get(key), after[key])
    for key in MAY_BE_ABSENT:
        if before.get(key) != after.get(key):
            raise _not_this_run(folder, key, before.get(key), after.get(key))


def _check_engine(found: TrainingState, engine: str, zero: int | None, folder: Path) -> None:
    """DDP and FSDP2 read each other's checkpoints, on any number of ranks; DeepSpeed its own.

    ZeRO 1 and 2 partition the same state, so they read each other's too; 0 and 3 keep it in other shapes.
    """
    native = ("ddp", "fsdp")
    if found.engine != engine and not (found.engine in native and engine in native):
        raise _not_this_run(folder, "engine.name", found.engine, engine)
    if engine == "deepspeed" and zero is not None and found.zero != zero and not {found.zero, zero} <= {1, 2}:
        raise _not_this_run(folder, "zero", found.zero, zero)


def _check_ranks(found: TrainingState, engine: str, world_size: int | None, zero: int | None, folder: Path) -> None:
    """DeepSpeed reads a partitioned checkpoint on other ranks, or at another stage, by way of a conversion.

    That knows AdamW's two moments of a whole model (ds_to_universal.py, 0.19), and nothing else. At stage 0 every rank
    holds everything, and any number can read it.
    """
    as_it_was = world_size in (None, found.world_size) and zero in (None, found.zero)
    if engine != "deepspeed" or found.zero == 0 or as_it_was:
        return
    optimizer, lora = found.signature.get("optimizer", "adamw"), found.signature.get("lora")
    if optimizer == "adamw" and lora is None:
        return
    what = f"a checkpoint of {optimizer}" if optimizer != "adamw" else "a checkpoint of LoRA"
    raise UsageError(
        f"{folder}: DeepSpeed does not convert {what} for other ranks or another stage; it was written by "
        f"{human_count(found.world_size, 'rank')} at stage {found.zero}.",
        f"Go on with {human_count(found.world_size, 'rank')} and `engine.zero: {found.zero}`; or begin anew with "
        "engine.name: fsdp or ddp, which go on on any number.",
    )


def check_before_launch(
    checkpoints: Path,
    now: dict[str, Any],
    world_size: int | None,
    steps: int | None,
    engine: str = "deepspeed",
    precision: str = "auto",
    data: Sequence[str] = (),
) -> str | None:
    """What the launcher can refuse of the above in a second, instead of the ranks in half a minute.

    Args:
        now: the run's `signature`, as far as it is known.
        world_size, steps: None where they are not known.
        precision: `auto` where only the ranks will know.
        data: what of the data the earlier run had otherwise, in words: its store's key is a hash, which tells nobody.

    Returns:
        What will be gone on from, for printing; None where there is no checkpoint to be read.

    Raises:
        UsageError: as `check_resumable` and `check_not_past_the_end`.
    """
    for folder, found in _readable(checkpoints):
        if precision not in ("auto", found.precision):
            raise _not_this_run(folder, "precision", found.precision, precision)
        for key, value in now.items():
            if found.signature.get(key, value) != value:
                if key == "data" and data:
                    raise _other_data(folder, data)
                raise _not_this_run(folder, key, found.signature.get(key), value)
        for key in MAY_BE_ABSENT:
            if found.signature.get(key) != now.get(key):
                raise _not_this_run(folder, key, found.signature.get(key), now.get(key))
        _check_engine(found, engine, None, folder)
        _check_ranks(found, engine, world_size, None, folder)
        if steps is not None:
            check_not_past_the_end(found.step, steps, folder)
        ranks = (
            f", written by {human_count(found.world_size, 'rank')}"
            if world_size not in (None, found.world_size)
            else ""
        )
        return f"goes on from {folder.name} of {checkpoints}{ranks}, if it is whole"
    return None


def check_not_past_the_end(done: int, asked: int, folder: Path) -> None:
    """Refuses to train fewer steps than were done already.

    Raises:
        UsageError: with both numbers.
    """
    if done > asked:
        raise UsageError(
            f"{folder}: this run has done {done} steps; now {asked} are asked for.",
            "Ask for more steps, or begin anew: give the run another name or another --output.",
        )


def _readable(checkpoints: Path) -> Iterator[tuple[Path, TrainingState]]:
    for folder in newest_first(checkpoints):
        try:
            yield folder, read_state(folder)
        except (OSError, ValueError):  # the ranks name it and pass it over
            continue


def _other_data(folder: Path, changed: Sequence[str]) -> UsageError:
    return UsageError(
        f"{folder}: this checkpoint was made with {'; '.join(changed)}.",
        "Go on with what it was, or begin anew: give the run another name or another --output.",
    )


def _not_this_run(folder: Path, key: str, before: object, after: object) -> UsageError:
    return UsageError(
        f"{folder}: this checkpoint was made with {key} {before}; the run now has {after}.",
        f"Go on with {key} {before}, or begin anew: give the run another name or another --output"
        + ("; `model.init` may be the model/ folder that this run exports." if key in ("engine.name", "zero") else "."),
    )
