"""Run folders -> one HTML page that needs nothing else: no network, no script, curves as inline SVG.

`History` -> `curves` (what is drawn, thinned) -> `chart` (one SVG) -> `page` (the document). All pure; `write` does the
reading and the writing.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from runner.errors import write_atomically
from runner.history import History
from runner.report.page import page


def write(folders: Sequence[Path], output: Path | None) -> Path:
    """Reads the runs and writes their page.

    Args:
        output: the page; None: `report.html` in the run folder, for several runs in the current folder.

    Returns:
        Where it was written.

    Raises:
        UsageError: a folder is none of a run.
    """
    runs = [History.read(folder.absolute()) for folder in folders]
    target = output or (runs[0].folder.root / "report.html" if len(runs) == 1 else Path("report.html"))
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(target, page(runs).encode("utf-8", "backslashreplace"))
    return target
