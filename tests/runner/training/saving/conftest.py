"""What tests of checkpoints share: the only rank of a group, and an engine of small files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from runner.config.engine import CheckpointConfig

if TYPE_CHECKING:
    from runner.run_folder.training_state import TrainingState
    from runner.training.components.process_group import Ranks
    from runner.training.saving.checkpoints import Checkpoints


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """The only rank of a group that meets in a file."""
    import torch.distributed as dist

    from runner.training.components.process_group import Ranks

    meeting = tmp_path_factory.mktemp("meeting") / "ranks"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=0, world_size=1)
    yield Ranks()
    dist.destroy_process_group()


class SmallEngine:
    """Writes two files in a folder, as DeepSpeed does; fails on request."""

    def __init__(self, content: str = "weights", problem: BaseException | None = None) -> None:
        self.content, self._problem = content, problem

    def save(self, folder: Path) -> None:
        (folder / "engine").mkdir()
        (folder / "engine" / "weights.pt").write_text(self.content)
        if self._problem is not None:
            raise self._problem
        (folder / "engine" / "moments.pt").write_text(f"moments of {self.content}")

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"a checkpoint needs no {name}")


SIGNATURE = {
    "task": "masked-lm",
    "model": "acme/tiny-bert@1",
    "data": "abc",
    "batch.global": 8,
    "seed": 42,
}


def state(step: int, **changes: Any) -> TrainingState:
    from runner.run_folder.training_state import TrainingState

    return replace(TrainingState(step, 2, 2, "fp32", dict(SIGNATURE)), **changes)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoints"
    path.mkdir()
    return path


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def checkpoints(
    folder: Path, ranks: Ranks, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> Checkpoints:
    from runner.training.saving import checkpoints as module

    monkeypatch.setattr(module, "RETRY_AFTER_S", 0.0)
    return module.Checkpoints(folder, CheckpointConfig(keep=2), ranks, said.append)


def save(checkpoints: Checkpoints, *steps: int) -> None:
    for step in steps:
        checkpoints.save(SmallEngine(f"weights {step}"), state(step))


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


class Killed(BaseException):
    """Stands for the end of the process: no code may catch it."""
