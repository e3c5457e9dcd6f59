"""A run that goes on after its end, is stopped or killed before the next, and tells what it is at meanwhile.

One rank in this process, and a real model: a kill is that nothing more is called.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from runner.history import is_finished
from runner.train import Run
from runner.vitals import Vitals, read_pulse
from tests.runner.conftest import Cluster, metrics

if TYPE_CHECKING:
    from runner.training.loop import Trainer


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """This process is the only rank."""
    import torch.distributed as dist

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    meeting = tmp_path_factory.mktemp("meeting") / "ranks"
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def started(cluster: Cluster, path: Path) -> tuple[Run, Trainer]:
    """A rank that has resumed, and has made no step yet."""
    from runner.launch import rank_environment
    from runner.training.console import Console
    from runner.training.signals import StopRequest
    from runner.training.start import start

    run = Run.load(path, cluster.bundle, cluster.output(), ())
    run.folder.make()
    run.write_config()
    place = rank_environment({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1",
                              "MASTER_PORT": "1"})  # fmt: skip
    log = open(run.folder.logs / "said", "a")  # noqa: SIM115 - as long as the rank
    console = Console(log, log)
    trainer = start(run.config, run.inputs, run.folder, place, StopRequest(), console, Vitals(run.folder.logs, 0))
    trainer.resume()
    return run, trainer


def noted(run: Run) -> object:
    return json.loads(run.folder.environment.read_text())["exported_step"]
