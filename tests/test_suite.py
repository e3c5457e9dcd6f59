"""The lists of files in scripts: they are there, and the quick ones need no system package."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("script", ["scripts/test", "scripts/smoke", "scripts/lowest"])
def test_the_files_that_a_script_names_are_there(script: str) -> None:
    files = re.findall(r"\btests/\S+\.py\b", (ROOT / script).read_text())
    assert files and [file for file in files if not (ROOT / file).is_file()] == []
