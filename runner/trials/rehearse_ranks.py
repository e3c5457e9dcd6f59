"""The launcher of a rehearsal, behind its wall.

    python -m runner.trials.rehearse_ranks FOLDER

FOLDER is the run folder, with what is decided of the run.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from runner.errors import isolated
from runner.launch.resolved import Resolved, read
from runner.launch.start import start_work
from runner.run_folder.layout import RunFolder
from runner.trials.network import leave_network
from runner.trials.small_run import RANKS

WALL = "wall"
"""Beside the run folder: why the ranks are kept offline by variables only; empty: they are not."""


def command(folder: Path) -> list[str]:
    """The command of the launcher."""
    python, *options = isolated("runner.trials.rehearse_ranks", str(folder))
    return [python, "-u", *options]


def launch(resolved: Resolved) -> int:
    """Starts the ranks behind the wall, and waits; returns the exit code."""
    refused = leave_network()
    (resolved.job.folder.root.parent / WALL).write_text(refused or "", encoding="utf-8")
    return start_work(resolved, "train", "local", RANKS, os.environ).exit_code


if __name__ == "__main__":
    sys.exit(launch(read(RunFolder(Path(sys.argv[1])))))
