"""A checkpoint written beside training is the state of its step, and complete or absent."""

from __future__ import annotations

import errno
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from runner.config.checkpoint import CheckpointConfig
from tests.runner.training.saving.conftest import Killed, SmallEngine, names, save, state

if TYPE_CHECKING:
    from runner.training.components.process_group import Ranks
    from runner.training.saving.checkpoints import Checkpoints


@pytest.fixture
def beside(folder: Path, ranks: Ranks, said: list[str]) -> Checkpoints:
    """Checkpoints that are written while training continues."""
    from runner.training.saving.checkpoints import Checkpoints

    return Checkpoints(
        folder, CheckpointConfig(keep=2, best=True, asynchronous=True), ranks, said.append
    )


def test_what_training_changes_while_it_is_written_is_not_in_it(
    beside: Checkpoints, folder: Path, said: list[str]
) -> None:
    gate = threading.Event()
    engine = SmallEngine("weights 2", gate=gate)
    beside.save(engine, state(2))
    engine.content = "weights 3"
    # No file has its final name before all have.
    assert names(folder) == {"step-2.tmp"} and not beside.have_failed() and said == []
    gate.set()
    beside.finish()
    assert beside.newest_valid() == (folder / "step-2", state(2))
    assert (folder / "step-2" / "engine" / "weights.pt").read_text() == "weights 2"
    assert len(said) == 1 and said[0].startswith("checkpoint step-2 is whole")


def test_a_second_checkpoint_waits_for_the_first(beside: Checkpoints, folder: Path) -> None:
    gate = threading.Event()
    beside.save(SmallEngine("weights 2", gate=gate), state(2))
    threading.Timer(0.2, gate.set).start()
    beside.save(SmallEngine("weights 4"), state(4))
    assert "step-2" in names(folder)
    beside.finish()
    assert names(folder) == {"step-2", "step-4", "latest"}


@pytest.mark.parametrize("reported_at", ["the next step", "the next checkpoint", "the end"])
def test_a_disk_full_beside_training_is_reported_and_older_checkpoints_are_complete(
    beside: Checkpoints, folder: Path, reported_at: str
) -> None:
    save(beside, 2)
    beside.finish()
    beside.save(SmallEngine(problem=OSError(errno.ENOSPC, "No space left on device")), state(4))
    if reported_at == "the next step":
        deadline = time.monotonic() + 120
        while not beside.have_failed():
            assert time.monotonic() < deadline
    with pytest.raises(OSError, match="No space left"):
        save(beside, 6) if reported_at == "the next checkpoint" else beside.finish()
    assert not beside.have_failed()
    assert names(folder) == {"step-2", "latest"}
    save(beside, 6)
    beside.finish()
    assert beside.newest_valid() == (folder / "step-6", state(6))


def test_a_fault_beside_training_is_not_swallowed(beside: Checkpoints) -> None:
    beside.save(
        SmallEngine(problem=RuntimeError("mat1 and mat2 shapes cannot be multiplied")), state(6)
    )
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        beside.finish()


def test_a_kill_while_it_is_written_beside_training_leaves_nothing_that_counts(
    beside: Checkpoints, folder: Path
) -> None:
    save(beside, 2)
    beside.save(SmallEngine(problem=Killed()), state(4))
    with pytest.raises(Killed):
        beside.finish()
    assert names(folder) == {"step-2", "step-4.tmp", "latest"}
    assert beside.newest_valid() == (folder / "step-2", state(2))


def test_the_best_is_known_once_it_is_whole(beside: Checkpoints) -> None:
    assert beside.mark_best(2, 1.0)
    beside.save(SmallEngine(), state(2))
    # Its thread may still be writing.
    assert not beside.mark_best(4, 2.0)
