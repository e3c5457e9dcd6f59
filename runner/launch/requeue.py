"""A job that was stopped goes back in the queue, after all of its ranks are gone."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

from runner.errors import IncompleteError, say
from runner.slurm.commands import ask
from runner.slurm.environment import SlurmJobEnvironment
from runner.slurm.script import MAX_REQUEUES

SCONTROL_TIMEOUT_S = 40
TRIES = 5
"""How often a busy Slurm controller is asked."""


def requeue(job: SlurmJobEnvironment) -> None:
    """Requeues the job if Slurm counts it as running and `MAX_REQUEUES` is not reached."""
    if obstacle := _why_not_requeued(job):
        say(obstacle)
        return
    restart = job.restart_count + 1
    # Said first: Slurm can end this script before scontrol returns.
    say(f"job {job.job_id} goes back in the queue (restart {restart} of at most {MAX_REQUEUES})")
    # Its SIGTERM is no news then: the error that it is elsewhere would ask for a command.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(IncompleteError.exit_code))
    requeued = _scontrol("requeue", str(job.job_id))
    if requeued.returncode != 0:
        why = requeued.stderr.strip()
        say(f"Slurm refused to requeue the job: {why}; submit the run again to resume")
        return
    # Slurm ends this script as part of the requeue; an exit before that would only race with it.
    time.sleep(60)


def _why_not_requeued(job: SlurmJobEnvironment) -> str:
    """The reason why this job is not requeued, as a message; empty: it can be requeued."""
    shown = _scontrol("show", "job", str(job.job_id), "--oneliner")
    if shown.returncode != 0:
        why = shown.stderr.strip()
        return f"stopped: Slurm does not answer ({why}); submit the run again to resume"
    fields = dict(field.partition("=")[::2] for field in shown.stdout.split())
    if fields.get("BatchFlag") != "1":
        return (
            "stopped by a signal; run the same command again to resume (only batch jobs are "
            "requeued)"
        )
    if fields.get("JobState") != "RUNNING":
        return (
            f"stopped: Slurm ends the job ({fields.get('JobState')}), so it is not requeued; "
            "submit it again to resume"
        )
    if job.restart_count >= MAX_REQUEUES:
        return (
            f"stopped: requeued {job.restart_count} times already; submit the run again to resume"
        )
    return ""


def _scontrol(*arguments: str, tries: int = TRIES) -> subprocess.CompletedProcess[str]:
    """Asks Slurm's controller, up to `tries` times: the rest of the run depends on the answer."""
    for left in reversed(range(tries)):
        try:
            done = ask("scontrol", *arguments, timeout_s=SCONTROL_TIMEOUT_S)
            answer = done or subprocess.CompletedProcess(
                arguments, 1, "", "scontrol is not on PATH"
            )
        except (OSError, IncompleteError) as error:
            answer = subprocess.CompletedProcess(arguments, 1, "", str(error))
        if answer.returncode == 0:
            break
        if left:
            time.sleep(5)
    return answer
