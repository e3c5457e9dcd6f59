"""People read what they read when it was recorded, and Slurm is asked as often."""

from __future__ import annotations

from pathlib import Path

from tests.golden.compare import must_equal
from tests.golden.words import record


def test_words_are_as_recorded(tmp_path: Path) -> None:
    must_equal("words", record(tmp_path))
