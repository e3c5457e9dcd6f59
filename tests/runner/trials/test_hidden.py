"""The folder of a rehearsal is gone afterwards, whatever ended it."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

import pytest

from runner.trials.rehearse import hidden_folder


def test_it_is_gone_with_the_folders_above_it_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), hidden_folder(tmp_path / "output" / "run") as folder:
        assert folder.parent == tmp_path / "output" and folder.name.startswith(".run.rehearsal-")
        (folder / "run").mkdir()
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_rehearsal_left_is_removed_by_the_next(tmp_path: Path) -> None:
    done = subprocess.Popen(["true"])
    done.wait()
    prefix = f".run.rehearsal-{platform.node()}-"
    (tmp_path / f"{prefix}{done.pid}" / "run").mkdir(parents=True)
    (tmp_path / f"{prefix}1").mkdir()  # of a process that lives
    with hidden_folder(tmp_path / "run"):
        assert not (tmp_path / f"{prefix}{done.pid}").exists()
    assert [path.name for path in tmp_path.iterdir()] == [f"{prefix}1"]
