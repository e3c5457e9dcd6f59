"""A run file, from the command to the first step: how many files a person opens who follows it.

Followed are the launcher from `runner train` to the start of the ranks, and rank 0 from its start
to the end of its first step, by the functions that run. What the story only calls on is not opened,
because its name and first line say what comes out of it: reading the run file and the bundle, the
facts that follow from them, the checks, the preparation of the data, the variables of a launcher,
and the ground files (`runner/*.py`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from unittest import mock

import pytest
from click.testing import CliRunner

import runner as package
from runner.cli import main
from runner.launch.outcome import Outcome
from tests.runner.conftest import Cluster
from tests.runner.run_folder.conftest import alone
from tests.support.warm import warm_python

__all__ = ["alone"]

ROOT = Path(package.__file__).parents[1]
BETWEEN = {"runner/cli/rank.py", "runner/training/rank.py"}
"""They lead from the start of a rank's process to its work; here the rank is in this process."""
MOST = 53
"""35 are wanted. Of these, 12 are parts of a rank that a reader changes one at a time: the engine,
batches, weights, checkpoints; 13 are what a run file, a bundle and a run folder hold, whose
properties are read everywhere; 6 are the task and what each folder knows about it."""


@contextmanager
def followed(*leaves: Any) -> Iterator[set[str]]:
    """The files of `runner` in which a function ran; not those inside of `leaves` and imports."""
    codes: set[CodeType] = {leaf.__code__ for leaf in leaves}
    ran: set[str] = set()
    depth = 0

    def follow(frame: FrameType, event: str, _: Any) -> None:
        nonlocal depth
        imports = frame.f_code.co_name == "<module>"
        if event == "call" and not depth and not imports:
            ran.add(frame.f_code.co_filename)
        if imports or frame.f_code in codes:
            depth += {"call": 1, "return": -1}.get(event, 0)

    sys.setprofile(follow)
    try:
        yield ran
    finally:
        sys.setprofile(None)


def test_a_reader_opens_few_files_from_the_command_to_the_first_step(
    shared_cluster: Cluster, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from runner import disks, isolation
    from runner.config.run_config import RunConfig
    from runner.job.check import check_run
    from runner.job.facts import fact
    from runner.job.findings import report
    from runner.job.training_run import TrainingRun
    from runner.launch import supervise, train
    from runner.launch.ranks import RankInfo, Start
    from runner.training.reporting import Console
    from tests.support.training.one_start import begin, place_alone

    path = shared_cluster.write("followed", engine={"name": "ddp"}, steps=2)
    monkeypatch.chdir(shared_cluster.folder)
    monkeypatch.setattr(supervise, "start_ranks", lambda *_, **__: Outcome("done", 0))
    leaves = (
        TrainingRun.load, check_run, report, fact.__get__, train.prepare_in_sandbox,
        isolation.isolate, disks.use_local_caches, RunConfig.explain, Start.of,
    )  # fmt: skip
    warm_python()  # it starts with the variables of the suite
    with mock.patch.dict(os.environ), followed(*leaves) as launcher:
        done = CliRunner().invoke(
            main, ["train", str(path), "--bundle", str(shared_cluster.bundle)]
        )
    assert done.exit_code == 0, done.output
    job = TrainingRun.load(path, shared_cluster.bundle, None, ())
    with open(shared_cluster.folder / "said", "a") as log, followed(RankInfo.of) as rank:
        trainer = begin(job, place_alone(), Console(log, log))
        trainer.resume()
        trainer.train_step()
    ran = {Path(name) for name in launcher | rank if name.startswith(f"{ROOT}/runner/")}
    inner = {path.relative_to(ROOT) for path in ran if path.parent != ROOT / "runner"}
    journey = BETWEEN | {path.as_posix() for path in inner}
    assert len(journey) <= MOST, "\n".join(sorted(journey))
    assert {"runner/launch/resolved.py", "runner/training/setup.py"} < journey
