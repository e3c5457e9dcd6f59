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
        (100, 100, 1.0, "fetch: 100 B of 100 B, 100 B/s"),
        (999, 0, 1.0, "fetch: 999 B, 999 B/s"),
        (1000, 0, 1.0, "fetch: 1 kB, 1 kB/s"),
        (999_499, 0, 1.0, "fetch: 999 kB, 999 kB/s"),
        (999_500, 0, 1.0, "fetch: 1 MB, 1 MB/s"),
        (1_000_000, 120_000_000, 1.0, "fetch: 1 MB of 120 MB, 1 MB/s, 119 s left"),
        (1_000_000, 121_000_000, 1.0, "fetch: 1 MB of 121 MB, 1 MB/s, 2 min left"),
        (1_000_000, 7_200_000_000, 1.0, "fetch: 1 MB of 7.2 GB, 1 MB/s, 120 min left"),
        (1_000_000, 7_201_000_000, 1.0, "fetch: 1 MB of 7.2 GB, 1 MB/s, 2 h left"),
        (1_000_000, 172_801_000_000, 1.0, "fetch: 1 MB of 173 GB, 1 MB/s, 2 days left"),
    ],
)
def test_a_line_in_a_log(done: int, total: int, took_s: float, line: str) -> None:
    assert log_line("fetch", done, total, took_s) == line
