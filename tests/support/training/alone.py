"""One rank in this process, and a real model; the fixture `alone` makes it the only rank."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from runner.job.training_run import TrainingRun
from tests.runner.conftest import Cluster

if TYPE_CHECKING:
    from runner.training.loop import Trainer

SMALL = {
    "engine": {"name": "ddp"},
    "batch": {"global": 4, "micro": 2},
    "dataset": {"asset": "reference", "limit": {"train": 40, "validation": 8}},
    "checkpoint": {"every": 100, "keep": 1},
}


def started(cluster: Cluster, path: Path) -> tuple[TrainingRun, Trainer]:
    """A rank that has resumed, and has made no step yet."""
    run = TrainingRun.load(path, cluster.bundle, cluster.output(path.stem), ())
    trainer = begun(run)
    trainer.resume()
    return run, trainer


def begun(run: TrainingRun) -> Trainer:
    """A rank that has loaded everything but a checkpoint."""
    from runner.training.reporting import Console
    from tests.support.training.one_start import begin, place_alone

    run.folder.make()
    run.write_config()
    log = open(run.folder.logs / "said", "a")  # noqa: SIM115 - as long as the rank
    return begin(run, place_alone(), Console(log, log))
