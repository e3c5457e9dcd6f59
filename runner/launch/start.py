"""The ranks of every command: started here or by srun, watched, judged, and requeued if stopped."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

from runner.errors import say
from runner.launch.environment import STOPPED
from runner.launch.hang_detector import HangDetector
from runner.launch.local import run_local
from runner.launch.outcome import Outcome, outcome_of
from runner.launch.requeue import requeue
from runner.launch.srun import job_of, run_batch
from runner.run_folder.checkpoints import newest_first
from runner.run_folder.layout import RunFolder
from runner.slurm.environment import tasks_per_node


def start_ranks(
    argv: Sequence[str],
    processes: int | None,
    folder: RunFolder,
    environ: Mapping[str, str],
    *,
    hang_after_s: float | None = None,
) -> Outcome:
    """Runs `argv` as ranks, waits for them, and prints how they ended.

    Args:
        argv: the command of a rank.
        processes: the number of ranks on this machine; None: those of this Slurm job, by srun. A
            job that was stopped by a signal is requeued.
        hang_after_s: seconds without a heartbeat that count as a hang. None: chosen automatically.

    Raises:
        StageError: as for `run_batch`; before a rank was started.
    """
    stopped = folder.root / STOPPED
    stopped.unlink(missing_ok=True)
    job = None if processes is not None else job_of(environ)
    ranks = processes if job is None else job.num_nodes * tasks_per_node(job)
    watch = HangDetector(folder.logs, ranks or 1, hang_after_s)
    if job is None:
        ended = run_local(argv, ranks or 1, folder.logs, watch, environ)
    else:
        ended = run_batch(argv, watch, environ)
    failures = watch.failures()
    outcome = outcome_of(
        replace(
            ended,
            saved=stopped.exists(),
            newest=next((path.name for path in newest_first(folder.checkpoints)), ""),
            failure=next(iter(failures), None),
            num_failures=len(failures),
        )
    )
    stopped.unlink(missing_ok=True)
    for line in outcome.report:
        print(line, file=sys.stderr)
    for line in outcome.messages:
        say(line)
    if outcome.kind == "stopped" and job is not None:
        requeue(job)
    return outcome
