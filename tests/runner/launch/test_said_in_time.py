"""What is said before the ranks start: in order, with a remedy, and only what was compared."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from runner.config.run_config import RunConfig
from runner.errors import UsageError
from runner.job.resume import note_changes
from runner.launch import train
from runner.run_folder.layout import RunFolder
from runner.slurm.job_array import members
from tests.runner.conftest import RUN
from tests.runner.preflight.test_preflight import Terminal, terminal

__all__ = ["terminal"]


def config_of(folder: Path, *overrides: str, **changes: Any) -> RunConfig:
    path = folder / "tiny.yaml"
    settings = {**RUN, "name": "tiny", **changes}
    path.write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in settings.items()))
    return RunConfig.load(path, overrides)


def test_a_launcher_keeps_back_nothing_that_ranks_could_overtake(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`train: already prepared` came after `model exported`: it lay in a buffer."""
    written = io.BytesIO()
    run: Any = type("run", (), {"config": None, "inputs": None, "folder": RunFolder(Path("x"))})
    monkeypatch.setattr(train, "recipes", lambda *_: {"train": ["recipe"]})
    monkeypatch.setattr(train, "check_together", lambda _stores: None)
    monkeypatch.setattr(train, "prepare", lambda _recipe, _stores, say: say("already prepared"))
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written))
    train.prepare_all(run, 8)
    assert written.getvalue() == b"already prepared\n"


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["steps=16"], "started with steps=8, and its end decides the learning rate (linear)"),
        (["steps=16", "schedule.name=constant"], ""),
        ([], ""),
    ],
)
def test_a_resume_with_other_steps_says_that_the_learning_rate_is_another(
    tmp_path: Path, overrides: list[str], says: str
) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.make()
    changes = {"steps": 8, "schedule": {"name": "linear"}}
    folder.config.write_text(config_of(tmp_path, **changes).to_yaml())
    notes = note_changes(config_of(tmp_path, *overrides, **changes), folder)
    about = [note.message for note in notes if "learning rate" in note.message]
    assert bool(about) == bool(says) and says in "".join(about)


@pytest.mark.parametrize(
    ("overrides", "changes", "remedy"),
    [
        ([], {"name": "n" * 300}, "of at most 200"),
        ([], {"steps": None, "epochs": "three"}, "Write a number: epochs: 3"),
        (["optimizer.lr=abc"], {}, "Write a number: lr: 0.001"),
    ],
)
def test_a_value_that_cannot_be_has_a_remedy(
    tmp_path: Path, overrides: list[str], changes: dict[str, Any], remedy: str
) -> None:
    with pytest.raises(UsageError) as refused:
        config_of(tmp_path, *overrides, **changes)
    assert remedy in refused.value.remedy, refused.value


def test_a_sweep_makes_no_folder_with_a_name_too_long_for_a_disk() -> None:
    with pytest.raises(UsageError, match="too long"):
        members(["dataset.asset=" + "a" * 150, "model.asset=" + "b" * 150])


def test_more_ranks_than_cores_is_not_told_to_fit(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runner.job.check.usable_cores", lambda: 2)
    terminal.cluster.write(batch={"global": 64})
    _, said, _ = terminal.run("check", "tiny.yaml", "--processes", "64")
    assert "64 ranks share 2 cores of this machine: --processes 2 is faster" in said
    assert "it fits" not in said
