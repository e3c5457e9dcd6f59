"""The launcher of a rehearsal, behind its wall.

    python -m runner.trials.rehearse_ranks HIDDEN PHASE

HIDDEN is the rehearsal's folder. It holds the pickled run, which only this user can have written.
"""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path

from runner.errors import isolated
from runner.job.job import Job
from runner.launch.resolved import Resolved
from runner.launch.start import start_work
from runner.trials.network import leave_network
from runner.trials.small_run import RANKS

PICKLE, STAGES, WALL, LOG = "run.pickle", "stages.jsonl", "wall", "ranks.log"


def command(hidden: Path, phase: str) -> list[str]:
    """The command of a launcher."""
    python, *options = isolated("runner.trials.rehearse_ranks", str(hidden), phase)
    return [python, "-u", *options]


def launch(run: Job, hidden: Path, phase: str) -> int:
    """Starts the ranks behind the wall, and waits; returns the exit code."""
    refused = leave_network()
    (hidden / WALL).write_text(refused or "", encoding="utf-8")
    resolved = Resolved.of(run, phase=phase)
    return start_work(resolved, "rehearse", "local", RANKS, os.environ).exit_code


def main() -> None:
    """The launcher."""
    hidden, phase = sys.argv[1:]
    run = pickle.loads((Path(hidden) / PICKLE).read_bytes())
    sys.exit(launch(run, Path(hidden), phase))


if __name__ == "__main__":
    main()
