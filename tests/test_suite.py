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


def test_the_quick_tests_need_no_site_and_no_system_package() -> None:
    """scripts/test --quick installs only git and rsync."""
    text = (ROOT / "scripts/test").read_text()
    packages = re.findall(r"^    need (\S+)", text, re.MULTILINE)
    files = re.findall(r"^    (tests/\S+)$", text, re.MULTILINE)
    assert len(packages) > 10 and len(files) > 10
    needs = [*(f'"{package}"' for package in packages), "mark.site"]
    found = {file: (ROOT / file).read_text() for file in files}
    assert [file for file, code in found.items() if any(need in code for need in needs)] == []
