"""`runner status`: the state of a run, from its folder and from Slurm.

RUN (a run file, a run folder or a job's number) -> `find` -> `Status` -> lines for people, or JSON.
It runs on a login node, without torch.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from runner.config.command_config import load_run_file
from runner.from_stage import UsageError, human_size, nearest_name, quoted, suggest_path
from runner.run_folder.command_status import (
    document_of_command,
    lines_of_command,
    state_of_command,
)
from runner.run_folder.curves import with_curves
from runner.run_folder.history import SCRIPT, History, elements, is_run_folder, number
from runner.run_folder.history import where_asked as _to
from runner.run_folder.logs import last_error
from runner.run_folder.run_lock import RunLock, age_s, holder_of
from runner.slurm import jobs
from runner.slurm.jobs import Job
from runner.slurm.script import is_among

RECENT_STEPS = 50  # the pace of now: earlier steps may have run on other nodes

_UNDER_WAY = ("waiting", "running")

# Key of a metrics line -> how it is shown; memory is shown in the unit of all sizes.
_MEASURES = {
    "loss": "loss {:.4f}",
    "lr": "lr {:.2e}",
    "tokens_per_s": "{:.0f} tokens/s",
    "mfu": "MFU {:.1%}",
    "memory_gib": "",
}


@dataclass(frozen=True)
class Status:
    """The state of a run.

    Attributes:
        history: what its folder records; None: no job has written to it yet.
        state: waiting, running, finished, stopped, or new; `shown` has Slurm's word for an end.
        notes: what Slurm or this machine reports of it, one line each.
        job: its Slurm job, if Slurm knows one.
    """

    history: History | None
    run_folder: Path
    state: str
    notes: tuple[str, ...]
    job: Job | None

    @property
    def seconds_left(self) -> float | None:
        """Estimated from its recent steps; None if unknown."""
        if self.history is None or self.history.num_steps is None:
            return None
        recent = self.history.steps.numbers("step_s")[-RECENT_STEPS:]
        left = max(0, self.history.num_steps - self.history.done)
        return left * statistics.median(recent) if recent else None

    @property
    def shown(self) -> str:
        """The state for people: Slurm's own where a job ends, or did not end well."""
        word = self.job.state if self.job else ""
        ended_badly = word in jobs.ENDS and word != "COMPLETED" and self.state in ("stopped", "new")
        is_told = word == "COMPLETING" or ended_badly
        return word.lower().replace("_", " ") if is_told else self.state

    def lines(self) -> list[str]:
        """Lines for people."""
        name = self.history.name if self.history else self.run_folder.name
        lines = [f"{name}: {self.shown}  ({self.run_folder})", *(f"  {n}" for n in self.notes)]
        if self.history is None:
            return lines
        of_command = self.history.is_command
        progress = lines_of_command(self.history) if of_command else _progress(self.history)
        lines += [f"  {line}" for line in progress]
        if self.seconds_left and self.state == "running":
            left = format_duration(self.seconds_left)
            lines.append(f"  about {left} to go, at the pace of its last steps")
        return lines + [f"  note: {warning}" for warning in self.history.warnings]

    def document(self) -> dict[str, Any]:
        """The document of `--json`."""
        history, job = self.history, self.job
        return {
            "run_folder": str(self.run_folder),
            "state": self.state if self.state in _UNDER_WAY else self.shown,
            "job": job and {"id": job.id, "state": job.state, "words": job.describe()},
            "step": history.done if history else 0,
            "num_steps": history.num_steps if history else None,
            "seconds_left": self.seconds_left,
            "last": (history.steps.last if history else None) or None,
            "last_validation": (history.validations.last if history else None) or None,
            "memory": history.memory if history else {},
            "last_checkpoint": history.checkpoints[-1] if history and history.checkpoints else None,
            "warnings": list(history.warnings) if history else [],
            **(document_of_command(history) if history and history.is_command else {}),
        }


def find(what: str) -> tuple[Path, int | None]:
    """Finds the run folder for RUN, and the job's number if RUN is one.

    Args:
        what: a run folder, a run file (its folder is `output/<name>` in the current folder), or a
            job's number, of an element of a sweep `17_2`.

    Raises:
        UsageError: none of these; a job that Slurm no longer knows, or that `runner submit` did not
            create.
    """
    path = Path(what)
    if path.is_dir():
        return path.absolute(), None
    if path.is_file():
        folder = Path("output") / load_run_file(path).name
        if not folder.is_dir():
            raise UsageError(
                f"{path}: no run of it has begun: there is no {folder}.",
                f"runner submit {quoted(path)}, or runner train {quoted(path)}; or give its "
                "--output folder.",
            )
        return folder.absolute(), None
    if not re.fullmatch(r"\d+(_\d+)?", what, re.ASCII):
        raise UsageError(
            f"{what}: no run folder, run file or job.",
            _suggest_run(path, f"runner status output/<name>{_to()}, or a job's number."),
        )
    number, _, index = what.partition("_")
    if job := jobs.details(what):
        script = Path(job.get("Command", ""))
        if script.name != SCRIPT:
            log = job.get("StdOut", "")
            raise UsageError(
                f"job {what} runs {script}, which `runner submit` did not write.",
                f"Its log: {log}" if log else f"What Slurm knows of it: scontrol show job {what}",
            )
        if job.get("ArrayJobId", number) != number:  # Slurm's own number of one element
            index = job.get("ArrayTaskId", "")
        folder = script.parent
    else:
        # An element's log has its index: `slurm-17_2.out`.
        logs = Path("output").glob(f"*/logs/slurm-{number}*.out")
        found = (log for log in sorted(logs) if re.fullmatch(rf"slurm-{what}(_\d+)?", log.stem))
        folder = next((log.parent.parent.absolute() for log in found), Path())
    if folder == Path():
        raise UsageError(
            f"job {what}: Slurm does not know it (any more), and no run in output/ has its log.",
            f"Give the run folder: runner status output/<name>{_to()}",
        )
    names = elements(folder)
    of_index = [folder / name for name in names if str(names[name]) == index]
    return next(iter(of_index), folder), None if names else int(number)


def _suggest_run(path: Path, remedy: str) -> str:
    """A remedy for a RUN that does not exist: the nearest path, or the nearest run in `output/`."""
    if path.parent == Path():
        runs = {folder.name: str(folder) for folder in Path("output").glob("*") if folder.is_dir()}
        if near := nearest_name(path.name, runs):
            return f"Did you mean {runs[near]}? {remedy}"
    return suggest_path(path, remedy)


def status(run_folder: Path, job_id: int | None = None) -> Status:
    """Reads the state of a run.

    Args:
        job_id: the run's Slurm job. None: the newest one that its folder records.

    Raises:
        UsageError: the folder is not a run folder, and no job was submitted for it.
        IncompleteError: Slurm does not answer.
    """
    return _status(run_folder, job_id, jobs.queued(job_id), asks_for_ended=True)


def all_runs(output: Path) -> list[Status]:
    """Reads the state of every run below a folder; what was written last comes first.

    Slurm is asked once for its queue, and once for its accounts.

    Raises:
        UsageError: there is no run.
        IncompleteError: Slurm does not answer.
    """
    folders = sorted(_run_folders(output.absolute()), key=_written, reverse=True)
    if not folders:
        to = _to()
        here = "" if to else " or runner train RUN"
        raise UsageError(
            f"{output}: no run is below this folder.",
            f"Give a run folder: runner status FOLDER{to}; or begin one: runner submit RUN{to}"
            f"{here}",
        )
    queue = jobs.queued(with_ended=True)
    runs = [_status(folder, None, queue, asks_for_ended=False) for folder in folders]
    stopped = [
        run.history for run in runs if run.history and run.state == "stopped" and not run.job
    ]
    last = {history.folder.root: history.last_job for history in stopped}
    known = jobs.in_accounts({job for job in last.values() if job}) if queue is not None else {}
    return [replace(run, job=run.job or known.get(last.get(run.run_folder) or 0)) for run in runs]


def members(folder: Path) -> list[Path]:
    """The run folders in the folder of a sweep, or of several runs. A run or a bench has none."""
    is_run = is_run_folder(folder) and not (folder / SCRIPT).is_file()
    if is_run or (folder / "results.json").exists():
        return []
    shown = (child for child in sorted(folder.glob("*")) if not child.name.startswith("."))
    return [child for child in shown if is_run_folder(child)]


def runs_of(folder: Path) -> list[Path]:
    """As `members`; of a sweep, those that have not begun, too."""
    begun = {path.name for path in members(folder)}
    return [folder / name for name in sorted({*elements(folder)} | begun)]


def _run_folders(folder: Path) -> Iterator[Path]:
    """The run folders in a folder, and those of its sweeps. The trials of a bench are none."""
    its = runs_of(folder)
    for child in sorted({*folder.glob("*"), *its}):
        is_trials = (child / "results.json").exists()
        if child.is_file() or child.name.startswith(".") or is_trials:
            continue
        if found := runs_of(child):
            yield from found
        elif child in its or (child / SCRIPT).is_file() or is_run_folder(child):
            yield child


def _written(folder: Path) -> float:
    names = ("metrics.jsonl", "environment.json", "config.yaml", SCRIPT)
    paths = [folder / name for name in names]
    return max((path.stat().st_mtime for path in paths if path.exists()), default=0.0)


def table(runs: Sequence[Status], output: Path) -> list[str]:
    """One line per run for people: name, state, step, loss, job.

    Args:
        output: the folder that the names begin at.
    """
    rows = [("run", "state", "step", "loss", "job")]
    for run in runs:
        history = run.history
        of = f"/{history.num_steps}" if history and history.num_steps else ""
        loss = number(history.steps.last, "loss") if history else None
        rows.append(
            (
                str(run.run_folder.relative_to(output)),
                run.shown,
                f"{history.done if history else 0}{of}",
                "-" if loss is None else f"{loss:.4f}",
                run.job.describe().removeprefix("job ")
                if run.job
                else str((history and history.last_job) or "-"),
            )
        )
    return in_columns(rows)


def in_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """A line for each row, for a terminal: its cells stand below those of the row before."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _status(
    run_folder: Path, job_id: int | None, queue: Sequence[Job] | None, *, asks_for_ended: bool
) -> Status:
    try:
        history: History | None = with_curves(History.read(run_folder), quick=True)
    except UsageError:
        is_element = run_folder.name in elements(run_folder.parent)
        if not is_element and not (run_folder / SCRIPT).exists():
            raise
        history = None
    newest = job_id or (history.last_job if history else None)
    live_first = sorted(queue or [], key=lambda job: job.is_over)
    job = next((job for job in live_first if _writes(job, run_folder, newest)), None)
    if job is None and newest is not None and queue is not None and asks_for_ended:
        job = jobs.ended(newest)
    state, notes = _state(history, job, newest if queue is not None else None)
    return Status(history, run_folder, state, tuple(notes), job)


def _writes(job: Job, run_folder: Path, newest: int | None) -> bool:
    """Whether a job in the queue belongs to a run: by its script, or by the recorded number.

    The script of a sweep is in the parent folder of its runs; the index says which of them it is.
    """
    if not job.is_over and job.script == str(run_folder.parent / SCRIPT):  # else no script is read
        index = elements(run_folder.parent).get(run_folder.name)
        if index is not None:
            return is_among(index, job.tasks)
    return job.id == newest or (not job.is_over and job.script == str(run_folder / SCRIPT))


def _state(history: History | None, job: Job | None, last_job: int | None) -> tuple[str, list[str]]:
    notes = [job.describe()] if job is not None else []
    if job is not None and not job.is_over:
        waits = job.state in ("PENDING", "REQUEUED", "CONFIGURING")
        return "waiting" if waits else "running", notes
    if history is None:
        return "new", notes or ["submitted once; no job of it is in the queue"]
    if job is None and last_job is not None:
        notes.append(
            f"job {last_job} is no longer in the queue, and this cluster keeps no accounts of "
            "ended jobs"
        )
    if holder := holder_of(history.folder, RunLock.me({})):
        return "running", [*notes, holder.describe()]
    if history.is_command:
        state, more = state_of_command(history)
        return state, [*notes, *more]
    if history.num_steps is not None and history.done >= history.num_steps and history.is_exported:
        early = "" if history.ended_early is None else "ended early (evaluation.patience); "
        return "finished", [*notes, f"{early}its model: {history.model}"]
    return "stopped", [*notes, _advice(history, job)]


def _advice(history: History, job: Job | None) -> str:
    """A line on a run that has stopped."""
    root, script, here = history.folder.root, history.folder.root / SCRIPT, Path.cwd()
    near = root.relative_to(here) if root.is_relative_to(here) else root
    logs = f"runner logs {quoted(near)}{_to()}"
    if history.is_pulled:
        return "pulled before its end; what it does there: runner status --to CLUSTER"
    if not history.done and not history.checkpoints:
        if not any(history.folder.logs.glob("*")):
            return "it never began: there is no log"
        return f"it has not made a step; why: {logs}"
    if history.done and number(history.steps.last, "loss") is None:
        return (
            f"its loss was no number at step {history.done}; what to change, before it is run "
            f"again: {logs}"
        )
    then = "resumes from its last checkpoint" if history.checkpoints else "begins at step 1"
    if to := _to():
        again = f"submit it again: runner submit RUN{to}"
    elif script.is_file():
        again = f"submit it again: sbatch {quoted(near / SCRIPT)}"
    else:
        again = "start it again by the same `runner train RUN`"
    # The same settings would be refused again.
    if (job is None or job.exit_code.startswith("2:")) and (said := last_error(root)):
        return f"{said}\n  after that, {again}   (it {then})"
    why = f"why: {logs}; " if job is not None and job.state == "FAILED" else ""
    return f"{why}{again}   (it {then})"


def _progress(history: History) -> list[str]:
    lines = []
    if last := history.steps.last:
        of = f" of {history.num_steps}" if history.num_steps else ""
        values = [_form(last, key, form) for key, form in _MEASURES.items()]
        measures = ", ".join(filter(None, values)) or "no measures"
        since = age_s(history.folder.metrics)
        ago = "just now" if since < 10 else f"{format_duration(since)} ago"
        lines.append(f"step {history.done}{of}: {measures}; {ago}")
    if last := history.validations.last:
        loss = _form(last, "validation_loss", "loss {:.4f}") or "no loss"
        lines.append(f"validation at step {last['step']}: {loss}")
    for where, sizes in memory_of(history).items():
        lines.append(f"most memory of a rank: {where}: {sizes}")
    if history.checkpoints:
        kept = len(history.checkpoints)
        lines.append(f"checkpoint: step-{history.checkpoints[-1]} ({kept} kept)")
    elif history.is_pulled:
        lines.append("checkpoints: where it ran (runner pull --checkpoints brings the newest)")
    elif history.done:
        lines.append("checkpoint: none" if history.is_exported else "checkpoint: none yet")
    return lines


def memory_of(history: History) -> dict[str, str]:
    """`device` (if it is not the host) and `host` -> the most memory of each phase."""
    found = {}
    for where in ("device", "host"):
        known = {phase: most[where] for phase, most in history.memory.items() if where in most}
        if known:
            sizes = (f"{phase} {human_size(gib * 2**30)}" for phase, gib in known.items())
            found[where] = ", ".join(sizes)
    return found


def _form(line: Mapping[str, Any], key: str, form: str) -> str:
    value = number(line, key)
    if value is None:
        return f"{key} is no number" if key in line and line[key] is None else ""
    return form.format(value) if form else human_size(value * 2**30)


def format_duration(seconds: float) -> str:
    """A duration for people: `3 h 20 min`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    if minutes >= 5:
        return f"{minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
