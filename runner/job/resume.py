"""Compares a run with the one that is in its run folder and that it would continue."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from runner.config.run_config import RunConfig
from runner.errors import as_shown
from runner.inputs import Inputs
from runner.job.findings import Finding, note
from runner.job.plan import num_steps
from runner.run_folder.history import History, changed_since, changes
from runner.run_folder.layout import RunFolder
from runner.run_folder.training_state import check_before_launch, signature


def check_checkpoint(
    config: RunConfig,
    inputs: Inputs,
    folder: RunFolder,
    history: History | None,
    data: str,
    world_size: int | None,
) -> str | None:
    """Refuses a checkpoint of another run; returns a line on the checkpoint to be resumed.

    Args:
        config: the run file.
        inputs: its model and data.
        folder: the run folder.
        history: what it records.
        data: the key of the training data.
        world_size: the number of ranks; None: not known.

    Raises:
        UsageError: as for `check_before_launch`.
    """
    total = config.batch.total
    names = " or ".join(dict.fromkeys(f"`{source.asset}`" for source in inputs.datasets))
    return check_before_launch(
        folder.checkpoints,
        signature(config, inputs, data, total if isinstance(total, int) else None),
        world_size,
        _steps(config, history),
        config.engine.name,
        config.precision,
        _changed(config, history) or [f"other data of {names}"],
        _length_before(config, history),
    )


def note_changes(config: RunConfig, inputs: Inputs, history: History | None) -> Iterator[Finding]:
    """Yields notes on the bundle and settings that differ from those of the run to be resumed."""
    facts = history.facts if history else {}
    bundle = str(facts.get("bundle_id") or inputs.bundle_id)
    if bundle != inputs.bundle_id:
        what = f"this run was started with the bundle {as_shown(bundle)[:12]}, and goes on with "
        same = f"{inputs.bundle_id[:12]}: its model and training data are the same"
        yield note(f"{what}{same}")
    if (before := _length_before(config, history)) and config.schedule.name != "constant":
        what = f"this run was started with {before}, and its end decides the learning rate"
        yield note(f"{what} ({config.schedule.name}): from this start on it is another.")
    if changed := changed_since(history, config):
        what = f"from this start on, the run has other settings: {', '.join(changed)}"
        yield note(f"{what}. Its model card will name only the new ones.")


def _steps(config: RunConfig, history: History | None) -> int | None:
    """The number of steps that a run asks for; None: not known before its data are prepared.

    Args:
        config: the run file.
        history: of an earlier start. Only a run on the same data continues it, so its number of
            sequences holds for this one too.
    """
    if config.steps is not None:
        return config.steps
    facts: Any = history.facts if history else {}
    batch, sequences = facts.get("batch"), facts.get("num_sequences")
    total = config.batch.total
    if total == "auto" and isinstance(batch, dict):
        total = batch.get("global", "auto")
    if not (isinstance(total, int) and isinstance(sequences, int) and total > 0 < sequences):
        return None
    return num_steps(config, sequences, total)


def _length_before(config: RunConfig, history: History | None) -> str:
    """`KEY=VALUE` of what decided the steps of the earlier run, if it is another now."""
    known = changes(history, config)
    found = (f"{key}={known[key][0]}" for key in ("steps", "epochs") if key in known)
    return next((text for text in found if not text.endswith("=None")), "")


def _changed(config: RunConfig, history: History | None) -> list[str]:
    """Lists the keys that decide the training data and differ from the run to be resumed.

    Each entry has both values.
    """
    same = ("sequence_length", "packing", "dataset", "datasets")
    known = changes(history, config).items()
    found = [(key, *both) for key, both in known if key.split(".")[0] in same]
    found.sort(key=lambda one: one[0] != "sequence_length")
    return [f"{key} {old} (now {new})" for key, old, new in found]
