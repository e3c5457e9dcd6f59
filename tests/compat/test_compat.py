"""What an earlier version wrote is read by this one: a bundle, and a run folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from runner.config.run_config import RunConfig
from runner.run_folder.history import changed_since, history_of
from runner.run_folder.layout import RunFolder

KEPT = sorted(path for path in Path(__file__).parent.glob("[0-9]*") if path.is_dir())


@pytest.fixture(params=KEPT, ids=lambda path: path.name)
def kept(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of what a version wrote."""
    return Path(shutil.copytree(request.param, tmp_path / "kept"))


def run(kept: Path, *command: str) -> str:
    """A command as its user types it; returns what it printed."""
    words = [sys.executable, "-m", *command] if command[0] in ("stage", "runner") else command
    done = subprocess.run(words, cwd=kept, capture_output=True, text=True, env={**os.environ})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_one_version_is_kept() -> None:
    assert KEPT


def test_its_bundle_is_sound_by_both_verifiers(kept: Path) -> None:
    said = run(kept, "stage", "verify", "bundle", "--signers", "allowed_signers")
    assert "every byte" in said and "me@laptop" in said
    own = run(kept, sys.executable, "-I", "bundle/stage-verify.py", "bundle")
    (bundle_id,) = {line.split()[-1] for line in own.splitlines() if line.startswith("bundle id")}
    assert f"bundle id {bundle_id}" in said
    shown = run(kept, "stage", "show", "bundle")
    assert all(name in shown for name in ("bert", "lines", "table", "notes"))


def test_its_run_is_read_and_goes_on(kept: Path) -> None:
    shown = json.loads(run(kept, "runner", "status", "run", "--json"))
    assert (shown["state"], shown["step"]) == ("finished", 4)
    run(kept, "runner", "report", "run")
    assert (kept / "run/report.html").stat().st_size > 10_000
    # Its steps are not done again.
    before = (kept / "run/metrics.jsonl").read_text()
    words = ("run.yaml", "--bundle", "bundle", "--processes", "2", "--output", "run")
    said = run(kept, "runner", "train", *words, "--set", "steps=6")
    assert "resumed from step-4" in said
    after = (kept / "run/metrics.jsonl").read_text()
    assert after.startswith(before) and json.loads(after.splitlines()[-1])["step"] == 6


def test_its_run_has_the_settings_that_it_had(kept: Path) -> None:
    """A key that the version did not have has its default: it is no other setting."""
    config = RunConfig.load(kept / "run.yaml")
    assert changed_since(history_of(RunFolder(kept / "run")), config) == []
