"""A bundle with every kind of asset is made of the same files, rows and values as recorded."""

from __future__ import annotations

from pathlib import Path

from tests.golden.bundle import made_with, record, without_library_bytes
from tests.golden.compare import must_equal
from tests.golden.record import path_of


def test_the_bundle_is_as_recorded(tmp_path: Path) -> None:
    now, recorded = record(tmp_path), path_of("bundle").read_text(encoding="utf-8")
    if made_with(now) != made_with(recorded):  # other versions of the libraries, other bytes
        now, recorded = without_library_bytes(now), without_library_bytes(recorded)
    must_equal("bundle", now, recorded)
