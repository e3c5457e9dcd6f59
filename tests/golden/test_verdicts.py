"""Each of a thousand damages is found, and reported, as it was when the golden was recorded."""

from __future__ import annotations

from pathlib import Path

from tests.golden.compare import must_equal
from tests.golden.verdicts import record


def test_verdicts_are_as_recorded(tmp_path: Path) -> None:
    must_equal("verdicts", record(tmp_path))
