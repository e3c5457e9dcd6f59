"""One rank in this process, and a real model; the fixture `alone` makes it the only rank."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from runner.job.job import Job
from runner.run_folder.heartbeat import Heartbeat
from tests.runner.conftest import Cluster

if TYPE_CHECKING:
    from runner.training.loop import Trainer

SMALL = {
    "engine": {"name": "ddp"},
    "batch": {"global": 4, "micro": 2},
    "dataset": {"asset": "reference", "limit": {"train": 40, "validation": 8}},
    "checkpoint": {"every": 100, "keep": 1},
}


def started(cluster: Cluster, path: Path) -> tuple[Job, Trainer]:
    """A rank that has resumed, and has made no step yet."""
    run = Job.load(path, cluster.bundle, cluster.output(path.stem), ())
    trainer = begun(run)
    trainer.resume()
    return run, trainer


def begun(run: Job) -> Trainer:
    """A rank that has loaded everything but a checkpoint."""
    from runner.launch.environment import rank_environment
    from runner.training.components.device import StopRequest
    from runner.training.components.metrics import Console
    from runner.training.start import start

    run.folder.make()
    run.write_config()
    place = rank_environment({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0",
                              "MASTER_ADDR": "127.0.0.1",
                              "MASTER_PORT": "1"})  # fmt: skip
    log = open(run.folder.logs / "said", "a")  # noqa: SIM115 - as long as the rank
    console = Console(log, log)
    return start(
        run.config,
        run.inputs,
        run.folder,
        place,
        StopRequest(),
        console,
        Heartbeat(run.folder.logs, 0),
    )
