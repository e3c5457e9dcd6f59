"""The product answers as it did when each golden was recorded. (First jobs: tests/first_job.)"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.golden.bundle import made_with, without_library_bytes
from tests.golden.compare import must_equal
from tests.golden.ranks import record_with
from tests.golden.record import path_of, record
from tests.runner.conftest import bundle

__all__ = ["bundle"]


@pytest.mark.parametrize("name", ["asked", "outcome", "plan", "served", "verdicts"])
def test_it_answers_as_recorded(tmp_path: Path, name: str) -> None:
    must_equal(name, record(name, tmp_path))


def test_a_bundle_is_made_of_the_same_files_rows_and_values(tmp_path: Path) -> None:
    now, recorded = record("bundle", tmp_path), path_of("bundle").read_text(encoding="utf-8")
    if made_with(now) != made_with(recorded):  # other versions of the libraries, other bytes
        now, recorded = without_library_bytes(now), without_library_bytes(recorded)
    must_equal("bundle", now, recorded)


def test_ranks_get_the_same_commands_variables_and_places(tmp_path: Path, bundle: Path) -> None:
    must_equal("ranks", record_with(tmp_path, bundle))
