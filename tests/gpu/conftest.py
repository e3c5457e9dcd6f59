"""A device, and one rank in this process."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from runner.job.training_run import TrainingRun
from runner.launch.ranks import Rank, RankInfo
from runner.run_folder.heartbeat import Heartbeat
from runner.training.components.process_group import join, open_store
from runner.training.loop import Trainer
from runner.training.reporting import open_console
from tests.runner.conftest import Cluster, bundle, cluster, run_python, twins_bundle
from tests.support.training.one_start import begin

__all__ = ["bundle", "cluster", "run_python", "twins_bundle"]

MakeTrainer = Callable[..., Trainer]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The first GPU; the CPU where the dry run asks for it."""
    if torch.cuda.is_available():
        return torch.device("cuda", 0)
    if os.environ.get("AIRLIFT_GPU_TESTS_ON_CPU") == "1":
        return torch.device("cpu")
    pytest.skip("no CUDA device")


@pytest.fixture(autouse=True)
def cold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks start from nothing: the driver refuses a process that was forked after it was asked."""
    monkeypatch.setattr("tests.runner.conftest.warm_python", lambda: sys.executable)


@pytest.fixture
def cuda(device: torch.device) -> torch.device:
    """A GPU, or the test is skipped."""
    if device.type != "cuda":
        pytest.skip("no CUDA device")
    return device


@pytest.fixture(scope="session")
def joined(
    device: torch.device, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, str]]:
    """A process group of this process alone, with the backend of DeepSpeed."""
    meeting = str(tmp_path_factory.mktemp("meeting") / "file")
    variables = {
        "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1", "AIRLIFT_MEETING_FILE": meeting, "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        logs = tmp_path_factory.mktemp("logs")
        rank = Rank(RankInfo.of(os.environ), Heartbeat(logs, 0))
        join("deepspeed", device.type, rank.info, open_store(rank))
        yield variables
        torch.distributed.destroy_process_group()


@pytest.fixture
def trainer(joined: dict[str, str], tmp_path: Path, cluster: Cluster) -> Iterator[MakeTrainer]:
    """Makes the `Trainer` of a run file's settings, in this process."""
    with ExitStack() as stack:

        def make(name: str = "one", *, bundle: Path = cluster.bundle, **settings: Any) -> Trainer:
            own = Cluster(cluster.folder, bundle)
            path = own.write(name, **{"batch": {"global": 4, "micro": 2}, **settings})
            own.prepare(path)
            run = TrainingRun.load(path, bundle, own.output(name), ())
            run.folder.make()
            console = stack.enter_context(open_console(run.folder.logs / "rank-0.log"))
            made = begin(run, RankInfo.of(os.environ), console)
            made.resume()
            stack.callback(made.observer.close)
            return made

        yield make
