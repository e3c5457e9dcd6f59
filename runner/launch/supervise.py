"""The ranks of every command: started here or by srun, watched, judged, and requeued if stopped."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from runner.child import runner_command
from runner.errors import print_line, say
from runner.job import node_local
from runner.job.training_run import TrainingRun
from runner.launch.first_steps import halve_micro
from runner.launch.local import run_local
from runner.launch.outcome import Outcome, Traces, outcome_of
from runner.launch.ranks import Start
from runner.launch.resolved import Resolved, write_resolved
from runner.launch.srun import run_srun
from runner.launch.watch import HangDetector
from runner.run_folder.heartbeat import read_failures
from runner.run_folder.layout import RunFolder
from runner.run_folder.training_state import newest_first
from runner.slurm.requeue import requeue

TAIL_BYTES = 2**16
"""How much of a rank's log is read to find out why it ended."""


def start_work(resolved: Resolved, work: str, start: Start, environ: Mapping[str, str]) -> Outcome:
    """Starts the ranks of a run for one kind of work, and waits for them.

    To train, they are started again where the first steps did not fit (`halve_micro`).

    Args:
        resolved: what is decided about the run; is written into the run folder for rank 0.
        work: what the ranks do: a WORK of `runner rank`.
        start: which ranks.

    Raises:
        StageError: as for `start_ranks` and `environment_for_ranks`; before a rank was started.
    """
    run = resolved.run
    write_resolved(resolved)
    argv = rank_command(run, start, environ, "rank", str(run.folder.root), work)
    hang_after_s = None if run.config.hang_after == "auto" else run.config.hang_after

    def again(outcome: Outcome) -> bool:
        return work == "train" and halve_micro(run.folder, outcome, environ)

    return start_ranks(argv, start, run.folder, environ, again, hang_after_s=hang_after_s)


def rank_command(
    run: TrainingRun, start: Start, environ: Mapping[str, str], *arguments: str
) -> list[str]:
    """The command that starts a rank: in a job by the Python of the container or environment.

    Raises:
        StageError: the ranks would run another environment than the run file names.
    """
    prefix = environment_for_ranks(run, start, environ)
    argv = runner_command(*arguments, prefix=prefix)
    return [*run.config.slurm.around_ranks, *argv] if start.job else argv


def environment_for_ranks(
    run: TrainingRun, start: Start, environ: Mapping[str, str]
) -> Path | None:
    """The prefix of the ranks' environment on their nodes; None: that of this process.

    Raises:
        StageError: the ranks would run another environment than the run file names.
    """
    wanted, environment = run.config.environment, run.inputs.environment
    if wanted is None or environment is None:
        return None
    if start.job is not None:
        words = run.config.slurm.srun
        return node_local.arrange(wanted.node_local, environment, environ, print_line, words=words)
    node_local.check_running(environment)
    return None


def start_ranks(
    argv: Sequence[str],
    start: Start,
    folder: RunFolder,
    environ: Mapping[str, str],
    again: Callable[[Outcome], bool] = lambda _outcome: False,
    *,
    hang_after_s: float | None = None,
) -> Outcome:
    """Runs `argv` as ranks, waits for them, and prints how they ended.

    Args:
        argv: the command of a rank.
        start: which ranks. A Slurm job that was stopped by a signal is requeued.
        again: whether to start them once more after such an outcome, of which nothing is printed.
        hang_after_s: seconds without a heartbeat that count as a hang. None: chosen automatically.

    Raises:
        StageError: as for `run_srun`; before a rank was started.
    """
    while again(outcome := _run(argv, start, folder, environ, hang_after_s)):
        pass
    for line in outcome.report:
        print(line, file=sys.stderr)
    for line in outcome.messages:
        say(line)
    if outcome.kind == "stopped" and start.job is not None:
        requeue(environ)
    return outcome


def _run(
    argv: Sequence[str],
    start: Start,
    folder: RunFolder,
    environ: Mapping[str, str],
    hang_after_s: float | None,
) -> Outcome:
    """Runs the ranks once; returns how they ended."""
    folder.stopped.unlink(missing_ok=True)
    watch = HangDetector(folder.logs, start.world_size, hang_after_s)
    begun = {path.name: path.stat().st_size for path in folder.logs.glob("rank-*.log")}
    if start.job is None:
        ended = run_local(argv, start, folder.logs, watch, environ)
    else:
        ended = run_srun(argv, start, start.job, watch, environ)
    log = folder.logs / f"rank-{ended.rank}.log"
    left = Traces(
        saved=folder.stopped.exists(),
        newest=next((path.name for path in newest_first(folder.checkpoints)), ""),
        failures=tuple(read_failures(folder.logs)),
        last_words=_written_since(log, begun.get(log.name, 0)),
    )
    outcome = outcome_of(ended, left)
    if start.job is not None or "SLURM_JOB_ID" not in environ:  # else the job's script looks for it
        folder.stopped.unlink(missing_ok=True)
    return outcome


def _written_since(log: Path, size: int) -> str:
    """What was written to a log after it had this size, or the end of that; empty: nothing."""
    with suppress(OSError), log.open("rb") as file:
        file.seek(max(size, file.seek(0, os.SEEK_END) - TAIL_BYTES))
        return file.read().decode("utf-8", "replace")
    return ""
