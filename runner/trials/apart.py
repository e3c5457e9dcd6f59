"""A launcher in a process of its own: it can be ended, and its output goes to a log.

    python -m runner.trials.apart FOLDER WORK BY RANKS

FOLDER is the run folder, with what is decided about the run. WORK is as for `start_work`. BY is
`srun` for the ranks of this Slurm job, or `local` for RANKS on this machine.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from runner.from_stage import isolated
from runner.launch.ranks import Start
from runner.launch.resolved import Resolved, read_resolved, write_resolved
from runner.launch.supervise import end_ranks, start_work
from runner.processes import die_with_parent
from runner.run_folder.layout import RunFolder, write_json
from runner.slurm.environment import SlurmJobEnvironment

RESULT, OUT_OF_MEMORY = "trial.json", "out of memory"


def start_apart(
    resolved: Resolved,
    work: str,
    start: Start,
    log: Path,
    environ: Mapping[str, str],
    *,
    limit_s: float | None = None,
) -> int | None:
    """Starts the ranks of a run from a process of its own, and waits.

    Args:
        resolved: what is decided about the run.
        work, start: as for `start_work`.
        log: gets the output of the launcher and of rank 0.
        environ: the variables of the launcher.
        limit_s: the most seconds it may take; None: any.

    Returns:
        The exit code; None: it was ended after `limit_s`.
    """
    write_resolved(resolved)
    by = ("srun" if start.job else "local", str(start.on_node))
    python, *options = isolated("runner.trials.apart", str(resolved.run.folder.root), work, *by)
    with open(log, "wb") as output:
        process = subprocess.Popen(
            [python, "-u", *options],
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # Its own group: Ctrl-C ends the command, which ends it, and not both at once.
            start_new_session=True,
            preexec_fn=die_with_parent(),
        )
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends a launcher that still runs. Its ranks end with it, on other nodes too.

    Only the launcher is killed. srun is in the same group: it ends the ranks when its launcher is
    gone, and could not do so if it were killed too.
    """
    if process.poll() is None:
        process.kill()
        process.wait()
        if job := SlurmJobEnvironment.from_environ(os.environ):
            end_ranks(job.job_id, process.pid)


def launch(resolved: Resolved, work: str, start: Start) -> int:
    """Starts the ranks, and notes in the run folder what ended them; returns the exit code."""
    outcome = start_work(resolved, work, start, os.environ)
    if outcome.cause:
        how = OUT_OF_MEMORY if outcome.kind == "no_memory" else "failed"
        result = {"outcome": how, "words": outcome.cause}
        write_json(resolved.run.folder.root / RESULT, result)
    return outcome.exit_code


def main() -> None:
    """The launcher."""
    folder, work, by, ranks = sys.argv[1:]
    start = Start.in_job(os.environ) if by == "srun" else Start(int(ranks))
    sys.exit(launch(read_resolved(RunFolder(Path(folder))), work, start))


if __name__ == "__main__":
    main()
