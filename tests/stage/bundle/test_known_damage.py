"""Damage that was found stays known, with its report, until the files change."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from stage.bundle.receipt import find_damage
from stage.bundle.verifier import state_folder
from tests.stage.bundles import make_bundle
from tests.support.staging import run_here

CONFIG, VOCAB = "data/models/bert/config.json", "data/models/bert/vocab.txt"


@pytest.fixture
def sound(tmp_path: Path) -> Path:
    return make_bundle(tmp_path / "origin", big=False).root


@pytest.fixture
def damaged(sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy with one changed byte; the state folder is empty."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    copy = tmp_path / "copy"
    shutil.copytree(sound, copy)
    text = (copy / VOCAB).read_bytes()
    (copy / VOCAB).write_bytes(b"X" + text[1:])
    return copy


def known(bundle: Path, tmp_path: Path) -> set[str]:
    found = find_damage(state_folder({"XDG_STATE_HOME": str(tmp_path / "state")}), bundle)
    return {finding.path for finding in found.report.findings} if found else set()


def test_fast_and_show_name_known_damage_until_it_is_repaired(
    sound: Path, damaged: Path, tmp_path: Path
) -> None:
    assert ": sound: " in run_here("verify", damaged, "--fast").stdout
    assert "damaged" not in run_here("show", damaged).stdout
    run_here("verify", damaged, code=1)
    (kept,) = (tmp_path / "state/airlift/receipts").glob("*.damage.json")
    fast = run_here("verify", damaged, "--fast", code=1)
    assert "known to be damaged" in fast.stdout and "sound" not in fast.stdout
    assert str(kept) in fast.stderr and "stage verify found it" in fast.stderr
    assert str(kept) in run_here("verify", damaged, "--fast", "-q", code=1).stderr
    printed = run_here("verify", damaged, "--fast", "--json", code=1).stdout
    assert json.loads(printed)["known_damage"] == {"findings": 1, "report": str(kept)}
    assert "damaged: 1 finding: stage verify found it" in run_here("show", damaged).stdout
    shutil.copyfile(sound / VOCAB, damaged / VOCAB)
    assert ": sound: " in run_here("verify", damaged, "--fast").stdout
    assert "damaged" not in run_here("show", damaged).stdout


def test_fast_adds_to_known_damage_and_never_replaces_it(
    sound: Path, damaged: Path, tmp_path: Path
) -> None:
    run_here("verify", damaged, code=1)
    (damaged / CONFIG).unlink()
    run_here("verify", damaged, "--fast", code=1)
    assert known(damaged, tmp_path) == {CONFIG, VOCAB}
    shutil.copyfile(sound / VOCAB, damaged / VOCAB)
    run_here("verify", damaged, "--fast", code=1)
    assert known(damaged, tmp_path) == {CONFIG}
    shutil.copyfile(sound / CONFIG, damaged / CONFIG)
    run_here("verify", damaged)
    assert known(damaged, tmp_path) == set()
