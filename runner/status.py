"""`runner status`: where a run stands, from its folder and from Slurm. Runs on a login node, without torch.

RUN (a run file, a run folder or a job's number) -> `find` -> `Status` -> lines for people, or JSON.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner import jobs
from runner.config import RunConfig
from runner.errors import UsageError
from runner.history import History, number
from runner.holder import Holder, holder_of
from runner.jobs import Job

QUIET_S = 600
"""A run on this machine that has told nothing for so long, and whose process is gone, is not running."""

RECENT_STEPS = 50


@dataclass(frozen=True)
class Status:
    """Where a run stands.

    Attributes:
        state: waiting, running, finished, stopped, or new.
        words: what Slurm or this machine says of it, a line each.
        seconds_left: to its last step, by its recent steps; None where nobody can know.
    """

    history: History | None
    run_folder: Path
    state: str
    words: tuple[str, ...]
    job: Job | None
    seconds_left: float | None

    def lines(self) -> list[str]:
        """For people."""
        name = self.history.name if self.history else self.run_folder.name
        said = [f"{name}: {self.state}  ({self.run_folder})", *(f"  {line}" for line in self.words)]
        if self.history is None:
            return said
        said += [f"  {line}" for line in _progress(self.history, self.seconds_left, running=self.state == "running")]
        return said + [f"  note: {warning}" for warning in self.history.warnings]

    def document(self) -> dict[str, Any]:
        """For programs: what `--json` prints."""
        history = self.history
        last = dict(history.steps[-1]) if history and history.steps else None
        validation = dict(history.validations[-1]) if history and history.validations else None
        job = self.job
        return {
            "run_folder": str(self.run_folder),
            "state": self.state,
            "job": None if job is None else {"id": job.id, "state": job.state, "words": job.in_words},
            "step": last["step"] if last else 0,
            "num_steps": history.num_steps if history else None,
            "seconds_left": self.seconds_left,
            "last": last,
            "last_validation": validation,
            "last_checkpoint": history.checkpoints[-1] if history and history.checkpoints else None,
            "warnings": list(history.warnings) if history else [],
        }


def find(what: str) -> tuple[Path, int | None]:
    """The run folder that is meant, and the job's number if that was given.

    Args:
        what: a run folder, a run file (its default folder is `output/<name>` below here), or a job's number.

    Raises:
        UsageError: none of these; a job that Slurm no longer knows, or that `runner submit` did not make.
    """
    path = Path(what)
    if path.is_dir():
        return path.absolute(), None
    if path.is_file():
        return (Path("output") / RunConfig.load(path).name).absolute(), None
    if not (what.isascii() and what.isdigit()):
        raise UsageError(f"{what}: no run folder, run file or job.", "runner status output/<name>, or a job's number.")
    job_id = int(what)
    script = jobs.script_of(job_id)
    if script is None:
        for folder in sorted(Path("output").glob(f"*/logs/slurm-{job_id}.out")):
            return folder.parent.parent.absolute(), job_id
        raise UsageError(
            f"job {job_id}: Slurm does not know it (any more), and no run below output/ has its log.",
            "Give the run folder: runner status output/<name>",
        )
    if Path(script).name != "submit.sbatch":
        raise UsageError(f"job {job_id} runs {script}, which `runner submit` did not write.", "Give the run folder.")
    return Path(script).parent, job_id


def status(run_folder: Path, job_id: int | None = None) -> Status:
    """Looks at a run.

    Raises:
        UsageError: the folder is none of a run, and no job is about to write it.
        IncompleteError: Slurm does not answer.
    """
    queue = jobs.queued(job_id)
    try:
        history: History | None = History.read(run_folder)
    except UsageError:
        if not (run_folder / "submit.sbatch").exists():
            raise
        history = None
    newest = job_id or (history.last_job if history else None)
    job = next((job for job in queue or [] if _writes(job, run_folder, newest)), None)
    if job is None and newest is not None and queue is not None:
        job = jobs.ended(newest)
    state, words = _state(history, job, newest if queue is not None else None)
    return Status(history, run_folder, state, tuple(words), job, _seconds_left(history))


def _writes(job: Job, run_folder: Path, newest: int | None) -> bool:
    """Whether a job in the queue is that of a run: by its script, or by the number the run recorded.

    The script of a sweep lies beside its runs; which of them a task that still waits will be, nobody says.
    """
    scripts = [run_folder / "submit.sbatch", *([run_folder.parent / "submit.sbatch"] if job.state == "PENDING" else [])]
    return job.id == newest or job.script in map(str, scripts)


def _state(history: History | None, job: Job | None, last_job: int | None) -> tuple[str, list[str]]:
    words = [job.in_words] if job is not None else []
    if job is not None and not job.is_over:
        return ("waiting" if job.state in ("PENDING", "REQUEUED", "CONFIGURING") else "running"), words
    if history is None:
        return "new", words or ["submitted once; no job of it is in the queue"]
    if job is None and last_job is not None:
        words.append(f"job {last_job} is no longer in the queue, and this cluster keeps no accounts of ended jobs")
    if holder := holder_of(history.folder, Holder.me({})):
        return "running", [*words, holder.in_words]
    if _runs_here(history):
        return "running", [*words, f"process {history.facts['pid']} on this machine"]
    done, wanted = history.steps[-1]["step"] if history.steps else 0, history.num_steps
    if wanted is not None and done >= wanted and history.has_exported_its_last_step:
        return "finished", [*words, f"its model: {history.folder.model}"]
    if not history.steps and not history.checkpoints:
        return "stopped", [*words, "it has not made a step; `runner logs` may say why"]
    if history.steps and number(history.steps[-1], "loss") is None:
        return "stopped", [
            *words,
            f"its loss was no number at step {done}: `runner logs` says what to change; then run it again",
        ]
    return "stopped", [*words, "run the same command again: it goes on from its last checkpoint"]


def _runs_here(history: History) -> bool:
    """Whether rank 0 is a process of this machine, still at it."""
    pid = history.facts.get("pid")
    if not isinstance(pid, int) or pid <= 0 or history.facts.get("host") != platform.node():
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    # The number may be another process's by now.
    return _age_s(history) < QUIET_S


def _age_s(history: History) -> float:
    """Seconds since the run last wrote something."""
    paths = (history.folder.metrics, history.folder.environment)
    written = [path.stat().st_mtime for path in paths if path.exists()]
    return time.time() - max(written) if written else float("inf")


def _seconds_left(history: History | None) -> float | None:
    if history is None or not history.steps or history.num_steps is None:
        return None
    recent = [took for line in history.steps[-RECENT_STEPS:] if (took := number(line, "step_s")) is not None]
    if not recent:
        return None
    done = int(history.steps[-1]["step"])
    return max(0, history.num_steps - done) * statistics.median(recent)


def _progress(history: History, seconds_left: float | None, *, running: bool) -> list[str]:
    said = []
    if history.steps:
        last = history.steps[-1]
        of = f" of {history.num_steps}" if history.num_steps else ""
        measures = [
            words
            for key, form in (("loss", "loss {:.4f}"), ("lr", "lr {:.2e}"), ("tokens_per_s", "{:.0f} tokens/s"),
                              ("mfu", "MFU {:.1%}"), ("memory_gib", "{:.1f} GiB"))
            if (words := _form(last, key, form))
        ]  # fmt: skip
        said.append(f"step {last['step']}{of}: {', '.join(measures) or 'no measures'}; {_ago(_age_s(history))}")
    if history.validations:
        last = history.validations[-1]
        said.append(f"validation at step {last['step']}: {_form(last, 'validation_loss', 'loss {:.4f}') or 'no loss'}")
    if history.checkpoints:
        said.append(f"checkpoint: step-{history.checkpoints[-1]} ({len(history.checkpoints)} kept)")
    elif history.steps:
        said.append("checkpoint: none yet")
    if seconds_left and running:
        said.append(f"about {in_words(seconds_left)} to go, at the pace of its last steps")
    return said


def _form(line: Mapping[str, Any], key: str, form: str) -> str:
    value = number(line, key)
    if value is None:
        return f"{key} is no number" if key in line and line[key] is None else ""
    return form.format(value)


def _ago(seconds: float) -> str:
    return "just now" if seconds < 10 else f"{in_words(seconds)} ago"


def in_words(seconds: float) -> str:
    """A duration for people: `3 h 20 min`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min" if minutes >= 5 else f"{minutes} min {rest} s" if minutes else f"{rest} s"
