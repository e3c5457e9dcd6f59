"""The state in a checkpoint: checkpoints/step-N/state.json -> `TrainingState`.

`resume.py` has the rules by which a run continues from it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STATE, BEST = "state.json", "best.json"


@dataclass
class TrainingState:
    """What changes in a run and is saved, besides weights and optimizer, to resume exactly.

    Attributes:
        step: optimizer steps done. Order, masks, dropout and learning rate follow from it and the
            seed.
        zero: the ZeRO stage that wrote it.
        engine: the engine that wrote it.
        signature: what must be equal when it is read: model, data, batch, seed.
        evaluation_due: a stop signal came before the evaluation of this step.
        lowest: the lowest validation loss so far; None: there was no evaluation.
        lowest_step: its step.
        without_gain: evaluations since.
    """

    step: int
    world_size: int
    zero: int
    precision: str
    signature: dict[str, Any]
    evaluation_due: bool = False
    engine: str = "deepspeed"
    lowest: float | None = None
    lowest_step: int = 0
    without_gain: int = 0

    def resume(self, saved: TrainingState) -> None:
        """Takes over how far a checkpoint is. The rest is of this run."""
        self.step, self.evaluation_due = saved.step, saved.evaluation_due
        self.lowest, self.lowest_step = saved.lowest, saved.lowest_step
        self.without_gain = saved.without_gain

    def note_loss(self, loss: float) -> None:
        """Notes the validation loss of this step."""
        if self.lowest is None or loss < self.lowest:
            self.lowest, self.lowest_step, self.without_gain = loss, self.step, 0
        else:
            self.without_gain += 1


def read_state(folder: Path) -> TrainingState:
    """Reads the state of the checkpoint in `folder`.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not a state that this version knows.
    """
    try:
        return TrainingState(**json.loads((folder / STATE).read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{STATE} is damaged or of another version: {error}") from None


def by_step_newest_first(checkpoints: Path) -> list[Path]:
    """The folders `step-N`, by their numbers. One may be damaged: only the names are read."""
    found = [
        p
        for p in checkpoints.glob("step-*")
        if p.is_dir() and p.name.removeprefix("step-").isdecimal()
    ]
    return sorted(found, key=lambda p: -int(p.name.removeprefix("step-")))


def read_best(folder: Path) -> tuple[int, float] | None:
    """The best step and its validation loss, if noted and its checkpoint was written."""
    try:
        document = json.loads((folder / BEST).read_text(encoding="utf-8"))
        step, value = int(document["step"]), float(document["validation_loss"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return (step, value) if (folder / f"step-{step}").is_dir() else None
