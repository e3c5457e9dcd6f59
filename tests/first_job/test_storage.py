"""Disks that are full, closed or away, and checkpoints: S and K of the list."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from runner.config.engine import CheckpointConfig
from runner.run_folder.training_state import TrainingState
from runner.training.components.process_group import Ranks
from runner.training.saving import checkpoints
from runner.training.saving.checkpoints import Checkpoints
from tests.first_job.harness import (
    Found,
    Said,
    assert_found,
    check,
    write_run,
)
from tests.runner.training.saving.conftest import ranks
from tests.stage.environment.check.test_node import ROOMY
from tests.stage.environment.check.test_node import check as env_check
from tests.stage.environment.check.test_node import df as df_of
from tests.support import refuse_writes
from tests.support.environment.laptop import alone
from tests.support.node import Node

__all__ = ["ranks"]

GPT2: dict[str, Any] = {"task": "causal-lm", "model": {"asset": "gpt2"}}
ROOT = Path(__file__).parents[2]


# ---- real disks: entry -> options of tmpfs, what `check` says of a run folder on it

DISKS: dict[str, tuple[str, Found]] = {
    "S1": (
        "size=64m,nr_inodes=40",
        Found(("The disk has space but no free inodes",), "many small files", 5),
    ),
    "S4": (
        "size=64m,nr_inodes=40",
        Found(("39 files can still be made there", "df -i"), "--output", 5),
    ),
    "K3": ("size=4m", Found(("checkpoints and model need up to", "are free"), "keep", 5)),
    "K4": ("size=512k", Found(("the disk is full",), "Free space or quota there", 5)),
}


def check_in_child(folder: Path, bundle: Path, before: list[str], output: str) -> Said:
    """`runner check` in a process of its own, begun by other words."""
    write_run(folder, **GPT2)
    command = ("check", "tiny.yaml", "--bundle", str(bundle), "--processes", "2")
    done = subprocess.run(
        [*before, sys.executable, "-m", "runner", *command, "--output", output],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    return Said(done.returncode, done.stdout, done.stderr)


@pytest.mark.parametrize("entry", DISKS)
def test_a_disk_that_cannot_hold_the_run_is_found_on_the_login_node(
    staged: Path, tmp_path: Path, entry: str
) -> None:
    options, found = DISKS[entry]
    (tmp_path / "disk").mkdir()
    script = f'mount -t tmpfs -o {options} none disk || exit 99; exec "$@"'
    said = check_in_child(tmp_path, staged, [*alone("m"), "sh", "-c", script, "sh"], "disk/run")
    assert_found(said, found)


QUOTA = {"S2": Found(("your quota is used up, of bytes or of files",), "quota -s", 5)}


def test_a_quota_that_is_used_up_is_called_a_quota(staged: Path, tmp_path: Path) -> None:
    before = [sys.executable, refuse_writes.__file__, str(errno.EDQUOT), "65536"]
    assert_found(check_in_child(tmp_path, staged, before, "run"), QUOTA["S2"])


# entry -> what df says, TMPDIR, what `stage env check` says
NODES = {"S4": ("", "39000 files are needed at"), "S5": ("gone", "cannot be written")}


@pytest.mark.parametrize("entry", NODES)
def test_a_disk_that_cannot_hold_the_environment_is_found(tmp_path: Path, entry: str) -> None:
    temporary, said = NODES[entry]
    node = Node(tmp_path)
    node.add("df", ROOMY if temporary else df_of(900 << 20, 38999))
    variables = {"TMPDIR": str(tmp_path / temporary)} if temporary else {}
    code, output = env_check(node, tmp_path / "p", environment=variables, cuda=None)
    assert (code, said in output) == (1, True), output


# ---- checkpoints

STATE = TrainingState(2, 4, 2, "fp32", {"optimizer": "lion"})
RESUMED = {
    "K1": Found(
        ("does not convert a checkpoint of lion", "written by 4 ranks at stage 2"),
        "Resume with 4 ranks",
    )
}


def test_a_checkpoint_of_another_number_of_ranks_is_refused(staged: Path, tmp_path: Path) -> None:
    folder = tmp_path / "output/tiny/checkpoints/step-2"
    folder.mkdir(parents=True)
    (folder / "state.json").write_text(json.dumps(vars(STATE)))
    run = GPT2 | {"optimizer": {"name": "lion", "lr": 0.001}, "engine": {"zero": 2}}
    assert_found(check(tmp_path, staged, **run), RESUMED["K1"])


class Server:
    """An engine whose disk is away for the first so many saves."""

    def __init__(self, faults: list[OSError]) -> None:
        self.faults, self.tries = faults, 0

    def save(self, folder: Path) -> None:
        """Writes one file, as an engine does."""
        self.tries += 1
        (folder / "half").write_text("half of it")
        if self.faults:
            raise self.faults.pop(0)
        (folder / "weights").write_text("all of it")


def saved(
    folder: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch, *numbers: int
) -> tuple[Server, list[str], OSError | None]:
    """Saves a checkpoint on a disk with these errors."""
    said: list[str] = []
    engine: Any = Server([OSError(number, os.strerror(number)) for number in numbers])
    monkeypatch.setattr(checkpoints, "RETRY_AFTER_S", 0.0)
    keeper = Checkpoints(folder, CheckpointConfig(), ranks, said.append)
    folder.mkdir(exist_ok=True)
    try:
        keeper.save(engine, STATE)
    except OSError as error:
        return engine, said, error
    return engine, said, None


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_a_server_that_is_away_for_a_moment_costs_no_run(
    tmp_path: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    engine, said, error = saved(tmp_path / "checkpoints", ranks, monkeypatch, number)
    assert error is None and engine.tries == 2
    assert "checkpoint step-2" in said[0] and "one more try" in said[0]
    names = sorted(path.name for path in (tmp_path / "checkpoints/step-2").iterdir())
    assert names == ["files.json", "half", "state.json", "weights"]
