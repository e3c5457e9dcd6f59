"""Trains a recorded run again, in another folder, and compares every loss with the recorded one.

Run folder -> its config.yaml, bundle and world size -> `train` into another folder -> a verdict.
On CPUs equal means bit for bit. On GPUs some kernels add in another order each time, so a
difference is reported with its size and with the changes of the environment.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from runner.errors import UsageError, format_age, human_count
from runner.job.job import Job
from runner.launch.place import Start, as_launcher
from runner.launch.train import set_up, train
from runner.run_folder.history import History

_EXPLAINS = (
    "device",
    "world_size",
    "precision",
    "environment_tree",
    "python",
    "platform",
    "versions",
)
_COMPARED = ("loss", "validation_loss")


@dataclass(frozen=True)
class Verdict:
    """The result of a comparison.

    Attributes:
        compared: how many values were compared.
        first: step, name, recorded value and new value of the first difference; None: all equal.
        largest: the largest relative difference.
        missing: steps that only one of the two runs has.
    """

    compared: int
    first: tuple[int, str, float, float] | None
    largest: float
    missing: tuple[int, ...]

    @property
    def ok(self) -> bool:
        """Whether all recorded values are equal to the new ones, bit for bit."""
        return self.compared > 0 and self.first is None and not self.missing


def reproduce(
    recorded: Path,
    bundle: Path,
    output: Path | None,
    processes: int | None,
    environ: Mapping[str, str],
    say: Callable[[str], None],
) -> int:
    """Trains again and compares.

    Args:
        recorded: the folder of the recorded run.
        output: the folder of the new run. None: `<recorded>-reproduced`.
        processes: ranks on this machine. None: as many as recorded.

    Returns:
        The exit code: 0 equal, 1 different, else that of the training.

    Raises:
        UsageError: no run folder, no recorded step, another bundle, or another number of ranks.
    """
    then = History.read(recorded, whole=True)
    if not then.done:
        raise UsageError(
            f"{recorded}: no step was recorded, so there is nothing to compare with.",
            "Give the run folder of a run that trained.",
        )
    target = output or recorded.absolute().with_name(f"{recorded.absolute().name}-reproduced")
    if target.absolute() == recorded.absolute():
        raise UsageError(f"{target}: that is the recorded run itself.", "Give another --output.")
    run = Job.load(then.folder.config, bundle, target, ())
    if run.inputs.bundle_id != then.facts.get("bundle_id"):
        raise UsageError(
            f"{bundle}: bundle {run.inputs.bundle_id[:12]}; the run was trained on "
            f"{str(then.facts.get('bundle_id'))[:12]}.",
            "Give the bundle it was trained on.",
        )
    ranks = then.facts.get("world_size")
    if not isinstance(ranks, int) or ranks < 1:
        raise UsageError(
            f"{then.folder.environment}: it does not record how many ranks there were.",
            "Give another run folder: this one is damaged, or an old version wrote it.",
        )
    start = as_launcher(Start.of(environ, processes), "train --reproduce")
    set_up(os.environ)
    if processes is None and start.job is None:
        start = replace(start, on_node=ranks)
    if start.world_size != ranks:
        raise UsageError(
            f"the run had {human_count(ranks, 'rank')}, here are {start.world_size}: "
            "sums in another order are other numbers.",
            f"Use {human_count(ranks, 'rank')}.",
        )
    say(f"reproducing {recorded} in {target}: {human_count(ranks, 'rank')}, {_how_long(then)}")
    code = train(run, start, dry_run=False, environ=environ)
    if code != 0:
        return code
    now = History.read(target, whole=True)
    verdict = compare(then, now)
    for line in describe_verdict(verdict, then.facts, now.facts):
        say(line)
    return 0 if verdict.ok else 1


def _how_long(then: History) -> str:
    """Describes the run ahead: its steps, and the time that they took when they were recorded."""
    took = then.steps.numbers("step_s")
    steps = human_count(then.done, "step")
    if not took:
        return steps
    return (
        f"{steps}, which took {format_age(sum(took))} then ({statistics.median(took):.2f} s per "
        "step; the start, evaluations and checkpoints come on top)"
    )


def compare(then: History, now: History) -> Verdict:
    """Compares every recorded loss and validation loss. Pure."""
    before, after = _values(then), _values(now)
    missing = sorted({step for step, _ in before.keys() ^ after.keys()})
    first, largest = None, 0.0
    both = sorted(before.keys() & after.keys())
    for step, name in both:
        old, new = before[step, name], after[step, name]
        if old != new:
            first = first or (step, name, old, new)
            largest = max(largest, abs(new - old) / max(abs(old), 1e-30))
    return Verdict(len(both), first, largest, tuple(missing))


def _values(history: History) -> dict[tuple[int, str], float]:
    return {
        (step, name): value
        for measures in (history.steps, history.validations)
        for name in _COMPARED
        for step, value in measures.points(name)
        if value is not None
    }


def describe_verdict(
    verdict: Verdict, then: Mapping[str, Any], now: Mapping[str, Any]
) -> list[str]:
    """Describes the verdict for people; if something differs, with the changes of the environment.

    Args:
        then: `environment.json` of the recorded run.
        now: `environment.json` of the new run.
    """
    if verdict.ok:
        return [f"reproduced: {verdict.compared} losses, all equal, bit for bit"]
    lines = []
    if verdict.first is not None:
        step, name, old, new = verdict.first
        lines.append(
            f"not reproduced: the first difference is {name} of step {step}: {old!r} then, "
            f"{new!r} now; the largest of {verdict.compared} is {verdict.largest:.1e} of the value"
        )
    if verdict.missing:
        steps = ", ".join(map(str, verdict.missing[:5]))
        lines.append(f"not reproduced: only one of the two runs has step {steps}")
    if not verdict.compared:
        lines.append("not reproduced: no loss was recorded on both sides")
    for key in _EXPLAINS:
        before, after = then.get(key), now.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            names = sorted(before.keys() | after.keys())
            lines += [
                f"  {n}: {before.get(n)} then, {after.get(n)} now"
                for n in names
                if before.get(n) != after.get(n)
            ]
        elif before != after:
            lines.append(f"  {key}: {before} then, {after} now")
    return lines
