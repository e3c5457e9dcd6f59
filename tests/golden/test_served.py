"""`stage serve` answers the requests of four generations of clients as it did when recorded."""

from __future__ import annotations

from pathlib import Path

from tests.golden.compare import must_equal
from tests.golden.record import path_of
from tests.golden.served import replay


def test_answers_are_as_recorded(tmp_path: Path) -> None:
    recorded = path_of("served").read_text(encoding="utf-8")
    must_equal("served", replay(tmp_path, recorded))
