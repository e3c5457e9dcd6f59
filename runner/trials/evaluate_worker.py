"""`runner evaluate` inside the ranks: it loads the weights and evaluates once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from runner.errors import DamageError
from runner.run_folder.checkpoints import TrainingState, check_resumable
from runner.training.loop import Trainer
from runner.trials.evaluate import stopped

_OF_TRAINING = ("data", "batch.global", "seed")
"""What may be another one: only weights are taken from the checkpoint."""


def measuring(checkpoint: Path | None) -> Callable[[Trainer], None]:
    """Returns the work of a rank.

    Args:
        checkpoint: whose weights; None: those that the model has after loading.
    """

    def work(trainer: Trainer) -> None:
        trainer.observer.begin(0)
        trainer.observer.say(f"  {trainer.task.note}")
        if checkpoint is not None:
            trainer.state.step = _load(trainer, checkpoint).step
        trainer.end_phase("load")
        trainer.evaluate()
        trainer.ahead.close()
        trainer.observer.flush()
        trainer.ranks.barrier()
        if trainer.state.evaluation_due:
            raise stopped()

    return work


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
