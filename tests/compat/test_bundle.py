"""An earlier version's bundle (lock format 1) is verified, repaired and made with its old id."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.lib.hub.loopback_hub import LoopbackHub
from stage.bundle.bundle import Bundle
from stage.lock.read import read_lock
from tests.compat.recipe import BUNDLE_ID, DATASET, LARGE, MODEL, OLD, old_bundle, old_laptop


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Treat it as read-only."""
    return old_bundle(tmp_path_factory.mktemp("old") / "bundle")


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Iterator[Path]:
    yield Path(shutil.copytree(made, tmp_path / "copy"))
    shutil.rmtree(tmp_path, ignore_errors=True)


def stage(*arguments: object, code: int = 0, cwd: Path | None = None) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "stage", *map(str, arguments)],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def flip(file: Path, at: int) -> None:
    with open(file, "r+b") as opened:
        opened.seek(at)
        byte = opened.read(1)
        opened.seek(at)
        opened.write(bytes([byte[0] ^ 1]))


def test_it_is_sound_and_has_its_old_id(made: Path) -> None:
    said = stage("verify", made)
    assert "sound: 10 files" in said and f"bundle id {BUNDLE_ID}" in said
    assert json.loads(stage("verify", made, "--json"))["bundle_id"] == BUNDLE_ID
    assert f"bundle id {BUNDLE_ID}" in stage("show", made)


@pytest.mark.parametrize("verifier", ["its own", "of today"])
def test_both_its_own_script_and_that_of_today_verify_it(made: Path, verifier: str) -> None:
    root = Path(__file__).parents[2]
    own = made / "stage-verify.py"
    script = own if verifier == "its own" else root / "stage" / "verify" / "standalone.py"
    done = subprocess.run(
        [sys.executable, "-I", script, "--json", made], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["bundle_id"] == BUNDLE_ID


def test_its_lock_is_read_and_written_again_to_the_byte() -> None:
    text = (OLD / "bundle" / "stage.lock").read_bytes()
    assert (OLD / "laptop" / "compat.lock").read_bytes() == text
    lock = read_lock(text, "stage.lock")
    assert lock.to_json() == text and lock.id == BUNDLE_ID


def test_damage_in_its_large_file_is_known_to_the_block_and_repaired(
    made: Path, copy: Path, tmp_path: Path
) -> None:
    flip(copy / LARGE, 40 * 2**20)
    (copy / "data/models/tiny-gpt2/config.json").unlink()
    report, patch = tmp_path / "r.json", tmp_path / "patch"
    said = stage("verify", copy, "--report", report, code=1)
    assert "other bytes at 33554432-50331648" in said and "config.json`: missing" in said
    stage("patch", made, "--report", report, "-o", patch)
    stage("apply", copy, patch)
    assert f"bundle id {BUNDLE_ID}" in stage("verify", copy)


def test_its_lock_makes_the_same_bundle_again(made: Path, tmp_path: Path) -> None:
    """Same lock, same bytes, same id: fetched into a new folder, and into the old bundle."""
    laptop = old_laptop(tmp_path / "laptop")
    before = (laptop / "compat.lock").read_bytes()
    payload = made / "data"
    with LoopbackHub(tmp_path / "hub") as hub:
        model = {path.name: path.read_bytes() for path in (payload / "models/tiny-gpt2").iterdir()}
        speech = payload / "datasets/speech"
        dataset = {f"plain/{path.name}": path.read_bytes() for path in (speech / "plain").iterdir()}
        dataset["README.md"] = (speech / "CARD.md").read_bytes()
        hub.repositories.commit("models", MODEL, model)
        hub.repositories.commit("datasets", DATASET, dataset)
        fetch = ("fetch", "compat.yaml", "-o", "../bundle", "--endpoint", hub.endpoint)
        assert f"bundle id {BUNDLE_ID}" in stage(*fetch, "--locked", cwd=laptop)
        assert "nothing to do" in stage(*fetch, cwd=laptop)
        assert (laptop / "compat.lock").read_bytes() == before
        assert Bundle.open(tmp_path / "bundle").id == BUNDLE_ID
        assert (tmp_path / "bundle/stage.lock").read_bytes() == before
