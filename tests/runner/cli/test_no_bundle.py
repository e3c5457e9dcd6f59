"""A command that needs nothing of a Hub needs no bundle."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from runner.inputs import NO_BUNDLE
from stage.bundle.bundle import Bundle, read_tag, verify
from stage.lock.model import Lockfile
from tests.remedies.obeyed import obeys
from tests.support.commands import run_file, write_project

BIN = Path(sys.executable).parent


def runner(folder: Path, *words: str, code: int = 0) -> str:
    """What a command prints, in a folder without a bundle."""
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [BIN / "runner", *words], cwd=folder, env={**os.environ, "PATH": path},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


def test_the_bundle_with_nothing_in_it_is_as_stage_writes_one(tmp_path: Path) -> None:
    bundle = Bundle.open(NO_BUNDLE)
    assert bundle.lock == Lockfile(name="nothing", assets={})
    assert bundle.lock.to_json() == read_tag(NO_BUNDLE, "stage.lock")
    report = verify(NO_BUNDLE, state=tmp_path)
    assert report.ok, report


def test_a_command_runs_without_a_bundle(tmp_path: Path) -> None:
    write_project(tmp_path)
    run_file(tmp_path, "mine", "python train.py")
    said = runner(tmp_path, "check", "mine.yaml")
    assert "no bundle: the command gets nothing of a Hub" in said
    assert "next: runner train mine.yaml\n" in said, said
    runner(tmp_path, "train", "mine.yaml")
    assert (tmp_path / "output/mine/work/out/rank-0.json").exists()
    assert "the command ended with exit code 0" in runner(tmp_path, "train", "mine.yaml")


@pytest.mark.parametrize("key", ["manifest: mine.yaml", "environment: {asset: e}"])
def test_a_command_that_names_something_of_a_bundle_needs_one(tmp_path: Path, key: str) -> None:
    write_project(tmp_path)
    path = run_file(tmp_path, "mine", "python train.py")
    path.write_text(f"{path.read_text()}{key}\n")
    said = runner(tmp_path, "check", "mine.yaml", code=2)
    assert "no --bundle, and there is no ./bundle here" in said, said


@obeys("stage/file_kinds.py", "that of a program of yours")
@pytest.mark.parametrize("given", ["train.py", "empty.yaml"])
def test_what_is_no_run_file_is_refused_with_the_lines_of_one(tmp_path: Path, given: str) -> None:
    write_project(tmp_path)
    (tmp_path / "empty.yaml").touch()
    said = runner(tmp_path, "check", given, "--bundle", str(NO_BUNDLE), code=2)
    command, text = re.findall(r"`(command: [^`]*)`", said)[0], re.search("`(format: 1)`", said)
    assert text, said
    (tmp_path / "mine.yaml").write_text(f"{text[1]}\n{command}\n")
    assert "next: runner train mine.yaml" in runner(tmp_path, "check", "mine.yaml")
