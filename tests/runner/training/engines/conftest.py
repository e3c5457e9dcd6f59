"""What the tests of engines share: one pair of real ranks that does it all."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.runner.training.saving.conftest import ranks
from tests.support.once import once
from tests.support.warm import warm_python

__all__ = ["ranks"]
RUN_FILE = "format: 1\ntask: masked-lm\nmodel: {asset: bert}\ndataset: {asset: wikitext}\n"


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What tests.support.training.small_engines measured."""
    folder = once(tmp_path_factory, "engines", _measure)
    found: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return found


def _measure(folder: Path) -> None:
    run_file = folder / "run.yaml"
    run_file.write_text(RUN_FILE)
    program = "tests.support.training.small_engines"
    command = [warm_python(), "-m", program, str(folder), str(run_file)]
    root = Path(__file__).parents[4]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
