"""Imports that worked are not tried again that day, until something changes that decides them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from stage.environment.check.imports import PROBE, Answers, faults, read_answers


@pytest.fixture
def probe(tmp_path: Path) -> Callable[..., Answers]:
    """Runs the probe on the package `one`, whose import writes a line to `log`."""
    package = tmp_path / "site/one"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(f"open({str(tmp_path / 'log')!r}, 'a').write('.')\n")

    def run(**variables: str) -> Answers:
        answers = tmp_path / "answers"
        answers.write_text("")
        command = [
            sys.executable,
            str(PROBE),
            "--keep",
            str(tmp_path / "kept"),
            str(answers),
            "one",
        ]
        environ = {**os.environ, "PYTHONPATH": str(tmp_path / "site"), **variables}
        subprocess.run(command, env=environ, check=True, timeout=60)
        return read_answers(answers.read_text())

    return run


def test_an_import_that_worked_is_kept_until_something_changes(
    probe: Callable[..., Answers], tmp_path: Path
) -> None:
    assert "one" in probe().imported and not probe(SSH_CLIENT="another shell").unfinished
    again = probe()
    assert again.kept and "one" in again.imported and (tmp_path / "log").read_text() == "."
    assert not probe(LD_LIBRARY_PATH="/opt/gcc-old/lib64").kept
    (tmp_path / "site/one/new.py").touch()
    assert not probe().kept and (tmp_path / "log").read_text() == "..."


def test_an_import_that_failed_is_tried_again_each_time(
    probe: Callable[..., Answers], tmp_path: Path
) -> None:
    (tmp_path / "site/one/__init__.py").write_text("import nowhere\n")
    for _ in range(2):
        answers = probe()
        assert not answers.kept and len(faults(answers, 0)) == 1
