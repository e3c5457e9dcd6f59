"""`scripts/gpu-check` without a GPU: all items on the CPU, and the message without a device."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def gpu_check(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "scripts.lib.gpu_check", *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=1500,
    )  # fmt: skip


def test_it_ends_within_its_minutes_and_says_what_was_not_run(tmp_path: Path) -> None:
    done = gpu_check(str(tmp_path / "record"), "--dry-run", "--minutes", "0.1")
    assert done.returncode == 5, done.stderr
    record = json.loads((tmp_path / "record" / "gpu-check.json").read_text())
    states = {item["status"] for item in record["items"]}
    assert "not run" in states
    assert "failed" not in states


@pytest.mark.slow  # five minutes
def test_the_dry_run_measures_everything_on_the_cpu(tmp_path: Path) -> None:
    done = gpu_check(str(tmp_path / "record"), "--dry-run", "--minutes", "24")
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "record" / "gpu-check.json").read_text())
    assert {"tests", "bench bert-small-64 fsdp-full", "Trainer gpt2-small-64", "stopped rank"} <= {
        item["name"] for item in record["items"] if item["status"] == "ok"
    }
