"""A fact of a run is derived in one place, and a check reads what it says that it needs."""

from __future__ import annotations

import ast
import inspect
import pickle
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import runner
from runner.from_stage import UsageError
from runner.job.check import CHECKS
from runner.job.checks import any_run, training
from runner.job.findings import (
    Check,
    Facts,
    Finding,
    NotKnownError,
    after,
    examine,
    fact,
    needs,
    usage_error,
)
from runner.job.training_run import TrainingRun

ROOT = Path(runner.__file__).parent
# A function that derives a fact -> the fact whose body is its only caller.
DERIVED = {
    "ask_partition": "Run.partition",
    "verification": "Run.verification",
    "python_of_ranks": "Run.python_of_ranks",
    "memory_on_node": "Run.device",
    "ask_slurm": "Run.slurm_answer",
    "over_job": "Run.over",
    "weight_shapes": "TrainingRun.weight_shapes",
    "outline_of": "TrainingRun.outline",
    "shape_of": "TrainingRun.shape",
    "sequence_length": "TrainingRun.chosen_length",
    "recipes": "TrainingRun.recipes",
    "store_path": "TrainingRun.stores",
    "data_key": "TrainingRun.data",
    "decide": "TrainingRun.plan",
    "history_of": "TrainingRun.history",
    "describe_finished": "TrainingRun.finished",
    "check_checkpoint": "TrainingRun.resumes",
    "look_at_model": "TrainingRun.model_look",
    "look_at_texts": "TrainingRun.texts_look",
}
# Calls that derive no fact of a run: of one store, and where a launcher looks what `train` is.
OTHERS = {
    ("store_path", "data/prepare.py"),
    ("over_job", "launch/ranks.py"),
    ("over_job", "launch/supervise.py"),
}


def calls() -> Iterator[tuple[str, str, str]]:
    """The calls by name in `runner`: function, file, and the methods around it."""
    for path in ROOT.rglob("*.py"):
        where = path.relative_to(ROOT).as_posix()

        def inside(
            node: ast.AST, around: str, where: str = where
        ) -> Iterator[tuple[str, str, str]]:
            for child in ast.iter_child_nodes(node):
                name = getattr(child, "name", "") if isinstance(child, ast.stmt) else ""
                if isinstance(child, ast.Call) and isinstance(child.func, ast.Name):
                    yield child.func.id, where, around
                yield from inside(child, f"{around}.{name}".strip(".") if name else around)

        yield from inside(ast.parse(path.read_text(encoding="utf-8")), "")


def test_each_fact_is_derived_in_one_place() -> None:
    found: dict[str, list[str]] = {name: [] for name in DERIVED}
    for name, path, around in calls():
        if name in DERIVED and (name, path) not in OTHERS:
            found[name].append(around)
    assert found == {name: [around] for name, around in DERIVED.items()}


def facts_read(one: Check[Any]) -> set[str]:
    """The facts that a check reads, but by `known`."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(one.find)))
    names = {name for name in dir(TrainingRun) if isinstance(getattr(TrainingRun, name), fact)}
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "run"
        and node.attr in names
    }


@pytest.mark.parametrize("module", [any_run, training])
def test_a_check_needs_what_it_reads_and_is_in_the_table(module: Any) -> None:
    checks = [value for value in vars(module).values() if isinstance(value, Check)]
    own = [one for one in checks if one.find.__module__ == module.__name__]
    assert len(own) > 10
    in_table = {one.find for one in CHECKS}
    for one in own:
        assert one.find in in_table, one.find.__name__
        assert {needed.name for needed in one.needs} == facts_read(one), one.find.__name__


def test_the_checks_of_any_run_know_no_training() -> None:
    tree = ast.parse(inspect.getsource(any_run))
    read = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert not read & {"model", "dataset", "datasets", "task", "plan", "shape", "checkpoint"}


@pytest.mark.parametrize(
    "path", ["job/check.py", "job/checks/any_run.py", "job/checks/training.py"]
)
def test_a_table_of_checks_is_no_hub(path: str) -> None:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = [alias.name for node in imports for alias in node.names if alias.name != "annotations"]
    assert len(names) <= 40, names


class Numbers(Facts):
    """Facts that count how often they are derived."""

    def __init__(self) -> None:
        self.derived = list[str]()

    @fact
    def two(self) -> int:
        self.derived.append("two")
        return 2

    @fact
    def four(self) -> int:
        return self.two * self.two

    @fact
    def fails(self) -> int:
        self.derived.append("fails")
        raise UsageError("it fails", "Do not read it.")

    @fact
    def follows(self) -> int:
        return self.fails + 1

    @fact
    def nowhere(self) -> int:
        raise NotKnownError


@needs(Numbers.fails)
def first(run: Numbers) -> Iterator[Finding]:
    yield usage_error(f"never said: {run.fails}", "")


@needs(Numbers.follows)
def second(run: Numbers) -> Iterator[Finding]:
    yield usage_error(f"never said: {run.follows}", "")


@needs(Numbers.nowhere)
def third(run: Numbers) -> Iterator[Finding]:
    yield usage_error(f"never said: {run.nowhere}", "")


@needs(Numbers.four)
def last(run: Numbers) -> Iterator[Finding]:
    yield usage_error(f"{run.four}, and no more", "")


def test_a_fact_is_derived_once_and_raises_the_same_error_again() -> None:
    numbers = Numbers()
    assert (numbers.four, numbers.two) == (4, 2) and numbers.derived == ["two"]
    with pytest.raises(UsageError) as caught:
        numbers.follows  # noqa: B018 - a fact is derived by reading it
    with pytest.raises(UsageError) as again:
        numbers.fails  # noqa: B018
    assert caught.value is again.value and numbers.derived == ["two", "fails"]
    assert numbers.known(Numbers.four) == 4
    assert numbers.known(Numbers.follows) is numbers.known(Numbers.nowhere) is None


def test_an_error_of_a_fact_is_found_once_and_what_is_not_known_is_no_finding() -> None:
    found = examine(Numbers(), (first, second, third, last, *after((Numbers.fails,), last)))
    assert [finding.message for finding in found] == ["it fails", "4, and no more"]


def test_a_copy_with_a_given_fact_derives_the_others_anew() -> None:
    numbers = Numbers()
    assert numbers.four == 4
    larger = numbers.given(Numbers.two, 3)
    assert (larger.four, numbers.four) == (9, 4)
    assert larger.given(Numbers.nowhere, 1).four == 9
    assert pickle.loads(pickle.dumps(larger)).four == 4
