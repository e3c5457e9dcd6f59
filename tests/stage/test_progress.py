"""Progress: one line that fits its terminal, plain lines in a log, nothing beside JSON."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from stage.progress import log_line
from tests.stage.bundles import make_bundle
from tests.support.terminal import in_terminal


def test_verify_says_how_much_there_is(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path / "bundle").root
    told = in_terminal(100, sys.executable, "-m", "stage", "verify", bundle)
    assert re.search(r"verify +0% \|[ =]+\| 0.00B of \d+.\dMB", told), told


@pytest.mark.parametrize(
    ("done", "total", "took_s", "line"),
    [
        (1_200_000_000, 14_000_000_000, 30.0, "fetch: 1.2 GB of 14 GB, 40 MB/s, 5 min left"),
        (90_000_000, 100_000_000, 30.0, "fetch: 90 MB of 100 MB, 3 MB/s, 3 s left"),
        (90_000_000, 0, 30.0, "fetch: 90 MB, 3 MB/s"),
        (0, 100, 30.0, "fetch: 0 B of 100 B, 0 B/s"),
    ],
)
def test_a_line_in_a_log(done: int, total: int, took_s: float, line: str) -> None:
    assert log_line("fetch", done, total, took_s) == line
