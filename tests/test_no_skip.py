"""AIRLIFT_NO_SKIP turns a silent skip into a failure, so that CI cannot pass by not looking."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def outcome(folder: Path, test: str, environment: dict[str, str]) -> str:
    (folder / "test_it.py").write_text(test)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = gpu: x\n")
    clean = {name: value for name, value in os.environ.items() if name != "AIRLIFT_NO_SKIP"}
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "tests.conftest",
            "-p",
            "no:cacheprovider",
            "--rootdir",
            folder,
            folder,
        ],
        cwd=ROOT,
        env={**clean, **environment},
        capture_output=True,
        text=True,
    )
    return done.stdout.splitlines()[-1]


SKIPPED = "import pytest\n\ndef test_a():\n    pytest.skip('no reason')\n"
SKIPPED_MODULE = "import pytest\npytest.importorskip('no_such_module')\n"
SKIPPED_GPU = "import pytest\n\n@pytest.mark.gpu\ndef test_a():\n    pytest.skip('no GPU')\n"
EXPECTED_FAILURE = "import pytest\n\n@pytest.mark.xfail\ndef test_a():\n    assert False\n"
STRICT = {"AIRLIFT_NO_SKIP": "1"}


def test_a_skip_is_a_skip_on_a_laptop(tmp_path: Path) -> None:
    assert "1 skipped" in outcome(tmp_path, SKIPPED, {})


def test_a_skip_fails_where_nothing_may_be_skipped(tmp_path: Path) -> None:
    assert "1 failed" in outcome(tmp_path, SKIPPED, STRICT)


def test_a_skipped_module_fails_too(tmp_path: Path) -> None:
    assert "1 error" in outcome(tmp_path, SKIPPED_MODULE, STRICT)


def test_missing_hardware_and_expected_failures_are_fine(tmp_path: Path) -> None:
    assert "1 skipped" in outcome(tmp_path, SKIPPED_GPU, STRICT)
    assert "1 xfailed" in outcome(tmp_path, EXPECTED_FAILURE, STRICT)
