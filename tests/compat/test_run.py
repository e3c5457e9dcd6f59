"""Run folders and checkpoints of an earlier version: reports read them, and training resumes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from runner.cli import main
from stage.verify.receipt import record, state_folder
from stage.verify.verify import verify
from tests.compat.recipe import BUNDLE_ID, OLD, old_bundle
from tests.runner.conftest import Cluster, metrics

FINISHED = OLD / "cluster" / "output" / "finished"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return old_bundle(tmp_path_factory.mktemp("old") / "bundle")


def shown(*arguments: object) -> str:
    done = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.output
    return done.output


def test_its_run_folder_is_reported(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(FINISHED, tmp_path / "finished"))
    page = tmp_path / "page.html"
    shown("report", folder, "-o", page)
    text = page.read_text(encoding="utf-8")
    assert BUNDLE_ID in text and "5.3698 at step 4" in text and "4 of 4" in text


@pytest.mark.parametrize(
    ("name", "state"),
    [("finished", "finished"), ("killed-ddp", "stopped"), ("killed-deepspeed", "stopped")],
)
def test_its_status_is_known(tmp_path: Path, name: str, state: str) -> None:
    folder = Path(shutil.copytree(OLD / "cluster" / "output" / name, tmp_path / name))
    said = shown("status", folder)
    assert f"{name}: {state}" in said and "step 4 of 4: loss 5.5141" in said


@pytest.mark.parametrize(
    "name", [pytest.param("killed-ddp", marks=pytest.mark.slow), "killed-deepspeed"]
)
def test_training_resumes_from_its_checkpoint(tmp_path: Path, made: Path, name: str) -> None:
    """The lost steps are repeated with the values of an undisturbed run of that version."""
    shutil.copytree(OLD / "cluster", tmp_path, dirs_exist_ok=True)
    cluster = Cluster(tmp_path, made)
    done = cluster.run("train", f"{name}.yaml", "--processes", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resumed from step-2" in done.stdout
    folder = cluster.output(name)
    for key in ("loss", "grad_norm", "validation_loss"):
        assert metrics(folder, key) == [
            (step, pytest.approx(value, rel=1e-3)) for step, value in metrics(FINISHED, key)
        ]
    assert (folder / "model" / "model.safetensors").is_file()


def test_a_run_that_names_an_old_bundle_by_its_id_demands_that_it_was_read_whole(
    tmp_path: Path, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its id does not cover the block lists, so they do not prove what `bundle.id` asks for."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr("stage.bundle.stamp.UNSURE_NS", 0)
    settings = f"bundle: {{verified: required, id: {BUNDLE_ID}}}\n"
    run_file = tmp_path / "run.yaml"
    run_file.write_text((OLD / "cluster" / "finished.yaml").read_text() + settings)
    cluster = Cluster(tmp_path, made)
    assert record(state_folder(os.environ), verify(made)) is None
    said = cluster.refused("check", "run.yaml", code=3)
    assert "block lists that `bundle.id` does not cover" in said
    assert f"stage verify {made.resolve()} --id {BUNDLE_ID}" in said
    assert record(state_folder(os.environ), verify(made, bundle_id=BUNDLE_ID)) is None
    done = cluster.run("check", "run.yaml")
    assert done.returncode == 0 and "every byte verified" in done.stdout, done.stderr


def test_its_exported_model_loads() -> None:
    load = f"AutoModelForCausalLM.from_pretrained({str(FINISHED / 'model')!r})"
    code = f"from transformers import AutoModelForCausalLM; {load}"
    subprocess.run([sys.executable, "-c", code], check=True)
