"""The processes of a rehearsal: the launcher behind its wall, and its ranks.

    python -m runner.trials.rehearse_ranks HIDDEN PHASE           the launcher
    python -m runner.trials.rehearse_ranks HIDDEN PHASE rank      a rank, started by it

HIDDEN is the rehearsal's folder. It holds the pickled run, which only this user can have written.
"""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path
from typing import NoReturn

from runner import offline
from runner.errors import isolated
from runner.job.job import Job
from runner.launch.environment import RankEnvironment
from runner.launch.rank import run_rank
from runner.launch.start import start_ranks
from runner.run_folder.heartbeat import Heartbeat
from runner.trials.network import leave_network
from runner.trials.small_run import RANKS

PICKLE, STAGES, WALL, LOG = "run.pickle", "stages.jsonl", "wall", "ranks.log"
RANK = "rank"


def command(hidden: Path, phase: str, *more: str) -> list[str]:
    """The command of a launcher, or with `RANK` of its ranks."""
    python, *options = isolated("runner.trials.rehearse_ranks", str(hidden), phase, *more)
    return [python, "-u", *options]


def launch(run: Job, hidden: Path, phase: str) -> int:
    """Starts the ranks behind the wall, and waits; returns the exit code."""
    refused = leave_network()
    (hidden / WALL).write_text(refused or "", encoding="utf-8")
    return start_ranks(command(hidden, phase, RANK), RANKS, run.folder, os.environ).exit_code


def be_a_rank(run: Job, phase: str) -> NoReturn:
    """Does the work of a rank in one of the two phases, and ends the process."""
    offline.set_variables(os.environ)

    def work(place: RankEnvironment, heartbeat: Heartbeat) -> None:
        from runner.training.start import train
        from runner.trials.rehearse_worker import WORK

        train(run.config, run.inputs, run.folder, place, heartbeat, WORK[phase])

    run_rank(run.folder, os.environ, work)


def main() -> None:
    """The launcher, or a rank."""
    hidden, phase, *rest = sys.argv[1:]
    run = pickle.loads((Path(hidden) / PICKLE).read_bytes())
    if rest == [RANK]:
        be_a_rank(run, phase)
    sys.exit(launch(run, Path(hidden), phase))


if __name__ == "__main__":
    main()
