"""Writes one HTML page about one or more runs: curves to zoom into, no network, no server.

`History` -> `curves` (what is drawn, thinned) -> `page` (the document, with uPlot in it). Both are
pure; `write` reads and writes files.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from runner.errors import write_atomically
from runner.run_folder.history import History
from runner.run_folder.report_page import page
from runner.run_folder.run_lock import GONE_AFTER_S, age_s


def write_report(folders: Sequence[Path], output: Path | None) -> Path:
    """Reads the runs and writes their page.

    Args:
        folders: the run folders.
        output: the page; None: `report.html` in the run folder, or in the current folder for
            several runs.

    Returns:
        The path of the page.

    Raises:
        UsageError: a folder is not a run folder.
    """
    runs = [History.read(folder.absolute(), whole=True) for folder in folders]
    target = output or (
        runs[0].folder.root / "report.html" if len(runs) == 1 else Path("report.html")
    )
    target.parent.mkdir(parents=True, exist_ok=True)
    # A launcher touched its lock a short time ago; neither Slurm nor a process is asked.
    text = page(runs, [age_s(run.folder.holder) < GONE_AFTER_S for run in runs])
    write_atomically(target, text.encode("utf-8", "backslashreplace"))
    return target
