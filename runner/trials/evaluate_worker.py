"""`runner evaluate` inside the ranks: it loads the weights and evaluates once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from runner.errors import DamageError, IncompleteError
from runner.run_folder.training_state import TrainingState, check_resumable
from runner.training.loop import Trainer

_OF_TRAINING = ("data", "batch.global", "seed")
"""What may be another one: only weights are taken from the checkpoint."""


def measure(trainer: Trainer, *, checkpoint: str | None) -> None:
    """Evaluates once.

    Args:
        checkpoint: whose weights; None: those that the model has after loading.

    Raises:
        IncompleteError: a signal stopped it.
        DamageError, UsageError: the checkpoint cannot be used.
    """
    trainer.observer.begin(0)
    if checkpoint is None:
        trainer.observer.say(f"  {trainer.task.note}")
    else:
        trainer.observer.say(f"  weights from {checkpoint}")
        trainer.state.step = _load(trainer, Path(checkpoint)).step
    trainer.end_phase("load")
    trainer.evaluate()
    trainer.ahead.close()
    trainer.observer.flush()
    trainer.ranks.barrier()
    if trainer.state.evaluation_due:
        raise IncompleteError(
            "the evaluation was stopped by a signal.", "Run the same command again."
        )


def _load(trainer: Trainer, checkpoint: Path) -> TrainingState:
    """Loads a checkpoint.

    Raises:
        DamageError: it is not as it was written.
        UsageError: it is of another model, engine or precision.
    """
    found, problem = trainer.checkpoints.examine(checkpoint)
    if found is None:
        raise DamageError(
            f"{checkpoint}: {problem}.", "Evaluate another one: --checkpoint step-N, or best."
        )
    now = trainer.state
    same = {key: now.signature[key] for key in _OF_TRAINING if key in now.signature}
    check_resumable(replace(found, signature={**found.signature, **same}), now, checkpoint)
    trainer.engine.load(checkpoint)
    return found
