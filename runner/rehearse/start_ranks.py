"""The processes of a rehearsal: the launcher behind its wall, and its ranks.

    python -m runner.rehearse.start_ranks HIDDEN PHASE           the launcher
    python -m runner.rehearse.start_ranks HIDDEN PHASE rank      a rank, started by it

HIDDEN is the rehearsal's folder. It holds the pickled run, which only this user can have written.
"""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from pathlib import Path
from typing import NoReturn

from runner import offline
from runner.errors import StageError, isolated
from runner.launch.local import run_local
from runner.launch.rank import become_rank, end_rank, give_up
from runner.launch.train import Run
from runner.rehearse.network import leave_network
from runner.rehearse.small_run import RANKS

PICKLE, STAGES, WALL, LOG = "run.pickle", "stages.jsonl", "wall", "ranks.log"
RANK = "rank"


def command(hidden: Path, phase: str, *more: str) -> list[str]:
    """The command of a launcher, or with `RANK` of its ranks."""
    python, *options = isolated("runner.rehearse.start_ranks", str(hidden), phase, *more)
    return [python, "-u", *options]


def launch(run: Run, hidden: Path, phase: str) -> int:
    """Starts the ranks behind the wall, and waits; returns the exit code."""
    refused = leave_network()
    (hidden / WALL).write_text(refused or "", encoding="utf-8")
    return run_local(command(hidden, phase, RANK), RANKS, run.folder.root)


def be_a_rank(run: Run, phase: str) -> NoReturn:
    """Does the work of a rank in one of the two phases, and ends the process."""
    offline.set_variables(os.environ)
    place, heartbeat = become_rank(run.folder, os.environ)
    try:
        from runner.rehearse.worker import WORK
        from runner.training.start import train

        train(run.config, run.inputs, run.folder, place, heartbeat, WORK[phase])
    except StageError as error:
        give_up(run.folder, place.rank, heartbeat, f"error: {error}", error)
    except Exception as error:  # noqa: BLE001 - recorded, and the end of this process
        give_up(run.folder, place.rank, heartbeat, traceback.format_exc(), error)
    end_rank(0)


def main() -> None:
    """The launcher, or a rank."""
    hidden, phase, *rest = sys.argv[1:]
    run = pickle.loads((Path(hidden) / PICKLE).read_bytes())
    if rest == [RANK]:
        be_a_rank(run, phase)
    sys.exit(launch(run, Path(hidden), phase))


if __name__ == "__main__":
    main()
