"""A run file, from the command to the first step: what a person reads who follows it.

Followed are the launcher from `runner train` to the start of the ranks, and rank 0 from its start
to the end of its first step. The functions that run are read in the order of their first calls.

- A function of fewer than `LEAST` statements is understood by its name: its file is not opened.
- What the story only calls on is not opened either, because its name and first line say what comes
  out of it: the run file and the bundle, the facts of the run, the checks, the preparation of the
  data, the variables of a launcher, and the ground files (`runner/*.py`).
- A return is a file that is opened again, after another one.

With `LEAST = 8`, and the facts and checks followed too, commit 48b00639 has 58 files and 50
returns; two readers, who followed the code by hand, counted 52 and 57.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import groupby
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
BETWEEN = ("runner/cli/run.py", "runner/training/rank.py")
"""They lead from the start of a rank's process to its work; here the rank is in this process."""
LEAST = 8
MOST_FILES, MOST_RETURNS = 35, 25


@cache
def tree_of(file: str) -> ast.Module:
    return ast.parse(Path(file).read_text())


def statements(code: CodeType) -> int:
    """The statements of a function, without its docstring; 0: a lambda, or made by a library."""
    for node in ast.walk(tree_of(code.co_filename)):
        if isinstance(node, ast.FunctionDef) and node.name == code.co_name:
            first = min([node.lineno, *(mark.lineno for mark in node.decorator_list)])
            if code.co_firstlineno == first:
                inside = sum(isinstance(inner, ast.stmt) for inner in ast.walk(node))
                return inside - 1 - (ast.get_docstring(node) is not None)
    return 0


@contextmanager
def followed(*leaves: Any) -> Iterator[list[CodeType]]:
    """The functions of `runner` by their first calls; not those inside of `leaves` and imports."""
    codes: set[CodeType] = {leaf.__code__ for leaf in leaves}
    ran: dict[CodeType, None] = {}
    depth = 0

    def follow(frame: FrameType, event: str, _: Any) -> None:
        nonlocal depth
        imports = frame.f_code.co_name == "<module>"
        if event == "call" and not depth and not imports:
            ran.setdefault(frame.f_code)
        if imports or frame.f_code in codes:
            depth += {"call": 1, "return": -1}.get(event, 0)

    found: list[CodeType] = []
    sys.setprofile(follow)
    try:
        yield found
    finally:
        sys.setprofile(None)
        found += [code for code in ran if code.co_filename.startswith(f"{ROOT}/runner/")]


def test_a_reader_opens_few_files_from_the_command_to_the_first_step(
    shared_cluster: Cluster, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from runner import disks, isolation
    from runner.config.run_config import RunConfig
    from runner.job.check import check_run
    from runner.job.findings import fact, report
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
    with (
        open(shared_cluster.folder / "said", "a") as log,
        followed(RankInfo.of, fact.__get__) as rank,
    ):
        trainer = begin(job, place_alone(), Console(log, log))
        trainer.resume()
        trainer.train_step()
    opened = [
        Path(code.co_filename).relative_to(ROOT).as_posix()
        for code in launcher + rank
        if Path(code.co_filename).parent != ROOT / "runner" and statements(code) >= LEAST
    ]
    pages = [name for name, _ in groupby([*BETWEEN, *opened])]
    files = set(pages)
    assert {"runner/launch/train.py", "runner/training/setup.py"} < files
    assert len(files) <= MOST_FILES, "\n".join(sorted(files))
    assert len(pages) - len(files) <= MOST_RETURNS, "\n".join(pages)
