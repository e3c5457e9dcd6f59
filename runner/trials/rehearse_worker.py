"""The rehearsal inside the ranks: two starts, and what each does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from runner.errors import StageError, human_size
from runner.run_folder.layout import read_metrics
from runner.training.loop import Trainer
from runner.trials.rehearse_ranks import STAGES


def first(trainer: Trainer) -> None:
    """The first start: one step, and a checkpoint."""
    note = _noting(trainer)
    trainer.resume()
    note("load", trainer.task.note)
    _step(trainer)
    note("step", _last(trainer, "loss"))
    trainer.save()
    trainer.ahead.close()
    files = (path for path in trainer.folder.checkpoints.rglob("*") if path.is_file())
    size = sum(path.stat().st_size for path in files)
    note("save", f"step-1, {human_size(size)}")


def second(trainer: Trainer) -> None:
    """The second start: it resumes, makes the last step, evaluates, saves and exports."""
    note = _noting(trainer)
    trainer.resume()
    if trainer.step != 1:
        raise StageError(
            f"it resumed from step {trainer.step}, not from step 1.",
            "Rehearse again; if it ends the same way, report it with this message.",
            exit_code=1,
        )
    _step(trainer)
    note("resume", f"from step-1; then {_last(trainer, 'loss')}")
    trainer.evaluate()
    has_any = "validation" in trainer.stores
    note("evaluate", _last(trainer, "validation_loss") if has_any else "no validation split")
    trainer.save()
    trainer.ahead.close()
    trainer.export()
    note("export", ", ".join(sorted(path.name for path in trainer.folder.model.iterdir())))


def rehearse(trainer: Trainer, *, phase: str) -> None:
    """One of the two starts."""
    {"first": first, "second": second}[phase](trainer)


def _step(trainer: Trainer) -> None:
    trainer.train_step()
    trainer.read_sums()


def _noting(trainer: Trainer) -> Callable[[str, str], None]:
    """What writes the end of a stage; in rank 0, after all ranks got there."""

    def note(name: str, words: str) -> None:
        trainer.ranks.barrier()
        if trainer.ranks.is_first:
            write_stage(trainer.folder.root.parent / STAGES, name, words)

    return note


def write_stage(path: Path, name: str, words: str) -> None:
    """Appends a line that the command shows."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps({"name": name, "words": words}) + "\n")


def _last(trainer: Trainer, key: str) -> str:
    """Such as `loss 10.31`, from metrics.jsonl; empty in ranks that do not write it."""
    if not trainer.ranks.is_first:
        return ""
    trainer.observer.flush()
    found = [line[key] for line in read_metrics(trainer.folder.metrics) if key in line]
    return f"{key.replace('_', ' ')} {found[-1]:.4g}"
