"""wandb beside TensorBoard: offline, from the run folder, and never in the way of training."""

from __future__ import annotations

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-untyped]
    EventAccumulator,
)

from runner.from_stage import StageError
from runner.job.check import check_run
from runner.job.findings import errors_in, raise_errors
from runner.job.installed import is_installed
from runner.job.run import Asked
from runner.job.training_run import TrainingRun
from runner.run_folder.layout import RunFolder
from runner.training.reporting import Console, Observer
from tests.runner.conftest import Cluster

LINE = {"step": 1, "epoch": 0.5, "loss": 2.0, "tokens_per_s": 10.0, "lr": 1e-3, "grad_norm": 1.0}


@pytest.mark.skipif(is_installed("wandb"), reason="wandb is installed here")
def test_check_refuses_it_where_the_environment_lacks_it(cluster: Cluster) -> None:
    path = cluster.write(wandb=True, engine={"name": "ddp"})
    found = check_run(TrainingRun.load(path, cluster.bundle, None, (), Asked()))
    (error,) = [error for error in errors_in(found) if "wandb" in error.message]
    assert "training needs wandb, not installed for" in error.message
    assert error.remedy == "pip install wandb" and error.exit_code == 2
    with pytest.raises(StageError, match="wandb"):
        raise_errors(found)


@pytest.mark.skipif(is_installed("wandb"), reason="wandb is installed here")
def test_a_rank_without_it_says_so_once_and_logs_on(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.make()
    with open(tmp_path / "said", "w") as out:
        settings = {"name": "tiny"}
        observer = Observer(folder, 2, Console(out, out), is_first=True, wandb=settings)
        observer.begin(0)
        observer.step(LINE)
        observer.step({**LINE, "step": 2})
        observer.close()
    said = (tmp_path / "said").read_text()
    assert said.count("wandb: nothing more is logged with it (No module named 'wandb')") == 1
    assert "metrics.jsonl has all" in said
    assert len(folder.metrics.read_text().splitlines()) == 2
    board = EventAccumulator(str(folder.tensorboard)).Reload()
    assert {
        tag: [(event.step, event.value) for event in board.Scalars(tag)]
        for tag in board.Tags()["scalars"]
    } == {
        tag: [(1, pytest.approx(value)), (2, pytest.approx(value))]
        for tag, value in LINE.items()
        if tag not in ("step", "epoch")
    }
