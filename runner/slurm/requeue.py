"""Puts a job that a signal has stopped back in Slurm's queue.

It comes after the end of all ranks. One shell function decides and prints it. The launcher runs it;
a job's script without a launcher (its Python may exist in a container only) has it as text.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Mapping

from runner.from_stage import IncompleteError

MAX_REQUEUES = 32
"""A job is requeued at most this often: beyond that, something else than progress causes it."""

STOPPED = "stopped"
"""The file in the run folder which says that all ranks saved because of a signal."""

STEP = "step"
"""The folder in the run folder by which the job's script and a launcher in a container agree."""

REQUEUE_FUNCTION = r"""
__say() { echo "runner: $1" >&2; }

# A busy controller may answer later, and the rest of the run depends on it: asked 5 times.
__ask_slurm() {
    for __try in 1 2 3 4 5; do
        if __said=$(timeout 40 scontrol "$@" 2>&1); then return 0; fi
        if [ "$__try" != 5 ]; then sleep 5; fi
    done
    return 1
}

# Requeues this job, which a signal has stopped, unless it is no batch job, Slurm ends it, or it was
# requeued as often as $1 says.
requeue_stopped_job() {
    if ! __ask_slurm show job "$SLURM_JOB_ID" --oneliner; then
        __say "stopped: Slurm does not answer ($__said); submit the run again to resume"
        return
    fi
    case " $__said " in
    *" BatchFlag=1 "*) ;;
    *)
        __say "stopped by a signal; run the same command again to resume \
(only batch jobs are requeued)"
        return
        ;;
    esac
    __state=${__said#* JobState=}
    __state=${__state%% *}
    if [ "$__state" != RUNNING ]; then
        __say "stopped: Slurm ends the job ($__state), so it is not requeued; \
submit it again to resume"
        return
    fi
    __restarts=${SLURM_RESTART_COUNT:-0}
    if [ "$__restarts" -ge "$1" ]; then
        __say "stopped: requeued $__restarts times already; submit the run again to resume"
        return
    fi
    # Said first: Slurm can end this script before scontrol returns.
    __say "job $SLURM_JOB_ID goes back in the queue (restart $((__restarts + 1)) of at most $1)"
    if ! __ask_slurm requeue "$SLURM_JOB_ID"; then
        __say "Slurm refused to requeue the job: $__said; submit the run again to resume"
        return
    fi
    # Slurm ends this script as part of the requeue; an exit before that would only race with it.
    sleep 60
}
""".strip()
"""For sh and bash, also under `set -e`. It needs scontrol, and timeout of coreutils."""


def requeue(environ: Mapping[str, str]) -> None:
    """Requeues the job of this process, or says why not."""
    # Slurm now sends SIGTERM: end without a word. The usual message would ask for a command.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(IncompleteError.exit_code))
    script = f"{REQUEUE_FUNCTION}\nrequeue_stopped_job {MAX_REQUEUES}"
    subprocess.run(["sh", "-c", script], env=environ, check=False)
