"""`runner evaluate` outside the ranks: which weights, in which folder, and what is printed.

The ranks work in a hidden folder beside the run's, so that the run folder stays as it is. It is
removed when the measures are known.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from runner.config.fields import shown
from runner.from_stage import StageError, UsageError, quoted, suggest
from runner.job.check import check_run
from runner.job.findings import report
from runner.job.run import Asked
from runner.job.training_run import TrainingRun
from runner.launch.ranks import Start, as_launcher
from runner.launch.resolved import Resolved
from runner.launch.supervise import start_work
from runner.launch.train import (
    check_all_installed,
    prepare_in_sandbox,
    ranks_of,
    set_up,
)
from runner.run_folder.history import settings_of
from runner.run_folder.layout import PULLED, RunFolder, read_metrics
from runner.run_folder.run_lock import hold_run_folder
from runner.run_folder.training_state import by_step_newest_first, read_best, read_state

FIRST = "none"
"""The name of the first weights: those of the bundle, or of `model.init`."""
_HOLD_OUT = ("asset", "train", "validation", "validation_seed")


@dataclass(frozen=True)
class Evaluation:
    """What is evaluated, and where the ranks work.

    Attributes:
        run: the run file; its folder is the hidden one.
        checkpoint: the folder of the checkpoint; None: the first weights.
        source: the name for printing: `step-8`, or where the first weights are from.
    """

    run: TrainingRun
    checkpoint: Path | None
    source: str


def choose(run: TrainingRun, wanted: str | None) -> Evaluation:
    """Finds the weights.

    Args:
        run: the run file, with the run folder.
        wanted: `newest`, `best`, `none` or `step-N`; None: the newest, or the first weights of a
            run that has not begun.

    Raises:
        UsageError: there is no such checkpoint, or nothing to evaluate on.
    """
    has_begun = run.folder.metrics.exists()
    if not any(data.validation for data in run.inputs.datasets):
        share = (
            "A share of the training split would be rows that this run has trained on."
            if has_begun and wanted != FIRST
            else "Or hold out a share of the training split: validation: 5%."
        )
        raise UsageError(
            f"{run.config.path}: no validation split is read.",
            f"Name a split of the dataset: --set dataset.validation=NAME. {share}",
        )
    if wanted != FIRST:
        _check_held_out(run)
    root = run.folder.root
    hidden = replace(run, folder=RunFolder(root.parent / f".evaluate-{root.name}"))
    found = {path.name: path for path in by_step_newest_first(run.folder.checkpoints)}
    if wanted == FIRST or (wanted is None and not found and not has_begun):
        init = run.config.model.init
        names = {"pretrained": f"the weights of {run.config.model.asset}", "scratch": "new weights"}
        return Evaluation(hidden, None, names.get(init, f"the weights of {init}"))
    if not found:
        raise UsageError(f"{run.folder.checkpoints}: there is no checkpoint.", _without(run))
    name: str | None = wanted
    if wanted in (None, "newest"):
        name = next(iter(found))
    elif wanted == "best":
        best = read_best(run.folder.checkpoints)
        name = None if best is None else f"step-{best[0]}"
    if name not in found:
        what = "best checkpoint (checkpoint.best: true keeps it)" if wanted == "best" else wanted
        raise UsageError(
            f"{run.folder.checkpoints}: there is no {what}.",
            suggest(str(wanted), found) or f"There are: {', '.join(found)}.",
        )
    return Evaluation(hidden, found[name], name)


def _without(run: TrainingRun) -> str:
    """What can be evaluated of a run without checkpoints; an adapter alone cannot."""
    ways = ["the first weights: --checkpoint none"]
    lora = run.config.lora
    if lora is None or lora.merge:
        ways.insert(0, f"the exported model: --checkpoint none --set model.init={run.folder.model}")
    if (run.folder.root / PULLED).is_file():
        again = f"runner pull {quoted(run.config.name)} --to CLUSTER --checkpoints"
        folder = f" -o {quoted(run.folder.root)}"
        ways.insert(0, f"its checkpoints, from where they are: {again}{folder}")
    text = "; ".join(ways)
    return f"{text[0].upper()}{text[1:]}."


def _check_held_out(run: TrainingRun) -> None:
    """Checks that a held out share of the training split is the one of the training.

    Raises:
        UsageError: the run has trained on rows that it would be measured on.
    """
    before = _splits(run.history.settings if run.history else {})
    now = _splits(settings_of(run.config))
    changed = [key for key in before if key in now and before[key] != now[key]]
    if _holds_out_a_share(run) and changed:
        key = changed[0]
        raise UsageError(
            f"{run.folder.root}: this run was trained with {key}: {shown(before[key])}; now it "
            f"is {shown(now[key])}, so it has trained on rows that it would be measured on.",
            "Name another split: --set dataset.validation=NAME; or train a run that holds them "
            "out from its beginning.",
        )


def doubt(run: TrainingRun, checkpoint: Path | None) -> str:
    """A warning where a share is held out of other data than those of the training.

    Args:
        run: the run file, with the run folder.
        checkpoint: whose weights are evaluated; None: the first weights, of no training.

    Returns:
        The warning; empty: the same data, or a split of its own.
    """
    bundle = run.history.facts.get("bundle_id") if run.history else None
    same = bundle in (None, run.inputs.bundle_id)
    if checkpoint is None or same or not _holds_out_a_share(run):
        return ""
    with suppress(OSError, ValueError):  # the ranks name it
        if read_state(checkpoint).signature.get("data") == run.data:
            return ""
    return (
        f"warning: this bundle ({run.inputs.bundle_id[:12]}) is not that of the training "
        f"({str(bundle)[:12]}): the share that is held out is drawn again, so it may have rows "
        "that were trained on\n  -> Evaluate with the bundle of the training, or name a split: "
        "--set dataset.validation=NAME"
    )


def _holds_out_a_share(run: TrainingRun) -> bool:
    return any(data.validation and data.validation.part for data in run.inputs.datasets)


def _splits(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that decide which rows are held out: dotted key -> value."""
    found = {f"dataset.{key}": settings.get(f"dataset.{key}") for key in _HOLD_OUT}
    several = settings.get("datasets")
    for number, data in enumerate(several if isinstance(several, list) else []):
        if isinstance(data, dict):
            found |= {f"datasets[{number}].{key}": data.get(key) for key in _HOLD_OUT}
    return {key: value for key, value in found.items() if key in settings or "[" in key}


def evaluate(
    run: TrainingRun,
    wanted: str | None,
    processes: int | None,
    environ: Mapping[str, str],
    say: Callable[[str], None],
) -> None:
    """Evaluates on the split that `dataset.validation` names.

    Args:
        run: the run file, with the run folder.
        wanted: as for `choose`.
        processes: ranks on this machine; None: one, or those of the Slurm job.
        environ: the environment variables.
        say: prints a line.

    Raises:
        StageError: it cannot work, or a rank failed.
    """
    start = as_launcher(Start.of(environ, processes), "evaluate")
    set_up(os.environ)
    chosen = choose(run, wanted)
    check_all_installed(run, start)
    read = [data.validation for data in run.inputs.datasets if data.validation]
    splits = " and ".join(dict.fromkeys(f"split `{split.name}`" for split in read))
    say(f"{run.config.path}: evaluates {chosen.source} on {splits}")
    if warning := doubt(run, chosen.checkpoint):
        say(warning)
    hidden = replace(chosen.run, asked=Asked(ranks_of(start)), environ=environ)
    report(check_run(hidden), say, verbose=False)
    _launch(chosen, start, environ)


def _launch(chosen: Evaluation, start: Start, environ: Mapping[str, str]) -> None:
    run, folder = chosen.run, chosen.run.folder
    folder.root.mkdir(parents=True, exist_ok=True)
    with hold_run_folder(folder, environ):
        _empty(folder)
        folder.make()
        prepare_in_sandbox(run, in_job=start.job is not None)
        checkpoint = None if chosen.checkpoint is None else str(chosen.checkpoint)
        resolved = Resolved.of(run, checkpoint=checkpoint)
        code = start_work(resolved, "evaluate", start, environ).exit_code
        written = read_metrics(folder.metrics) if code == 0 and folder.metrics.exists() else ()
        if not any("validation_loss" in line for line in written):
            raise StageError(
                f"the evaluation ended with exit code {code}.",
                f"The logs of its ranks: {folder.logs}",
                exit_code=code or 1,
            )
        _empty(folder)
    with suppress(OSError):  # another evaluation has begun
        folder.root.rmdir()


def _empty(folder: RunFolder) -> None:
    """Removes what an evaluation wrote, but not the lock."""
    for path in folder.root.iterdir():
        if path.is_dir() and path != folder.holder.parent:
            shutil.rmtree(path, ignore_errors=True)
        elif path.is_file():
            path.unlink(missing_ok=True)
