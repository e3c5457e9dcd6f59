"""Writes one HTML page about one or more runs, with no network, no script, and curves as inline
SVG.

`History` -> `curves` (what is drawn, thinned) -> `chart` (one SVG) -> `page` (the document). All of
these are pure; `write` reads and writes files.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from runner.errors import write_atomically
from runner.report.page import page
from runner.run_folder.history import History


def write(folders: Sequence[Path], output: Path | None) -> Path:
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
    runs = [History.read(folder.absolute()) for folder in folders]
    target = output or (
        runs[0].folder.root / "report.html" if len(runs) == 1 else Path("report.html")
    )
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(target, page(runs).encode("utf-8", "backslashreplace"))
    return target
