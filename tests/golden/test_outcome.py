"""How ranks ended decides the exit code, the requeue and the message, as it was recorded."""

from __future__ import annotations

from pathlib import Path

from tests.golden import outcome
from tests.golden.compare import must_equal


def test_every_end_of_ranks_has_the_outcome_that_was_recorded(tmp_path: Path) -> None:
    must_equal("outcome", outcome.record(tmp_path))
