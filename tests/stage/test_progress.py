"""Progress: one line that fits its terminal, plain lines in a log, nothing beside JSON."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from stage.progress import log_line
from tests.stage.bundles import make_bundle
from tests.support.terminal import in_terminal

WORK = """
import time
from stage.progress import Reporter
with Reporter() as reporter:
    with reporter.bytes_bar("fetch", {total}) as add:
        for number in range(5):
            time.sleep(0.12)
            add(10_000_000)
            if number == 2:
                reporter.note("a note")
    with reporter.at_work("make prompts"):
        time.sleep({clock})
print("done")
"""


def lines_of(told: str) -> list[str]:
    return [line.rstrip() for line in re.split(r"[\r\n]+", told) if line.strip()]


def work(total: int = 50_000_000, clock: float = 0.0) -> list[str]:
    return [sys.executable, "-c", WORK.format(total=total, clock=clock)]


@pytest.mark.parametrize(
    ("columns", "line"),
    [
        (100, r"fetch +\d+% \|[ =]+\| [\d.]+MB of 50.0MB, [\d.]+MB/s, \d\d:\d\d left"),
        (40, r"fetch +\d+%, [\d.]+MB/s, \d\d:\d\d left"),
    ],
)
def test_a_line_says_how_much_how_fast_and_how_long_in_the_room_there_is(
    columns: int, line: str
) -> None:
    lines = lines_of(in_terminal(columns, *work()))
    assert [shown for shown in lines if re.fullmatch(line, shown)], lines
    assert max(map(len, lines)) <= columns
    assert "a note" in lines and lines[-1] == "done"


def test_work_of_unknown_length_shows_a_clock_that_goes_on() -> None:
    lines = lines_of(in_terminal(80, *work(clock=1.3)))
    assert {"make prompts (00:00)", "make prompts (00:01)"} <= set(lines)


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
