"""What is decided for a run is what was decided when it was recorded."""

from __future__ import annotations

from pathlib import Path

from tests.golden import plan
from tests.golden.compare import must_equal


def test_every_run_file_gets_the_plan_that_was_recorded(tmp_path: Path) -> None:
    must_equal("plan", plan.record(tmp_path))
