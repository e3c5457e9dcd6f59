"""Ranks are started as they were when it was recorded, and make the same of their variables."""

from __future__ import annotations

from pathlib import Path

from tests.golden import ranks
from tests.golden.compare import must_equal
from tests.runner.conftest import bundle

__all__ = ["bundle"]


def test_ranks_get_the_commands_variables_and_places_that_were_recorded(
    tmp_path: Path, bundle: Path
) -> None:
    must_equal("ranks", ranks.record_with(tmp_path, bundle))
