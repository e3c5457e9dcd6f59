"""A task is one file: all other code asks the task, and compares no names."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from runner import tasks
from runner.cli import main
from runner.tasks import TASKS

RUNNER = Path(__file__).resolve().parents[3] / "runner"
OTHERS = [path for path in sorted(RUNNER.rglob("*.py")) if path.parent != RUNNER / "tasks"]


def names_that_decide(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of the tasks in comparisons, `match`, and as the keys of a table."""
    for node in ast.walk(tree):
        parts: list[ast.expr | None] = []
        if isinstance(node, ast.Compare):
            parts = [node.left, *node.comparators]
        elif isinstance(node, ast.Dict):
            parts = node.keys
        elif isinstance(node, ast.MatchValue):
            parts = [node.value]
        for part in parts:
            for inner in ast.walk(part) if part is not None else ():
                if isinstance(inner, ast.Constant) and inner.value in TASKS:
                    yield inner.lineno, str(inner.value)


def test_no_other_code_compares_names_of_tasks() -> None:
    """To add a task touched 18 files: 57 comparisons and tables in 22 files knew its name."""
    found = {
        f"{path.relative_to(RUNNER)}:{line}": name
        for path in OTHERS
        for line, name in names_that_decide(ast.parse(path.read_text("utf-8")))
    }
    assert found == {}


@pytest.mark.parametrize(
    "code",
    [
        "if config.task == 'masked-lm': pass",
        "x = config.task not in ('causal-lm', 'instruction')",
        "EXAMPLES = {'instruction': 'a.yaml'}",
        "match task:\n  case 'masked-lm': pass",
    ],
)
def test_each_way_to_compare_a_name_is_found(code: str) -> None:
    assert list(names_that_decide(ast.parse(code)))


def test_the_tasks_are_known_without_torch_and_numpy() -> None:
    """A login node has neither; with both, to import them would take seconds."""
    heavy = ("torch", "transformers", "numpy", "pyarrow", "runner.training")
    code = f"import sys, runner.tasks; print([n for n in {heavy} if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stdout + done.stderr


def test_a_new_file_is_a_new_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "loud_lm.py").write_text(
        "from dataclasses import replace\nfrom runner.tasks import causal_lm\n"
        "TASK = replace(causal_lm.TASK, name='loud-lm', place=99)\n"
    )
    monkeypatch.setattr(tasks, "__path__", [*tasks.__path__, str(tmp_path)])
    monkeypatch.setitem(sys.modules, "runner.tasks.loud_lm", None)
    monkeypatch.delitem(sys.modules, "runner.tasks.loud_lm")
    assert list(tasks._read()) == [*TASKS, "loud-lm"]


@pytest.mark.parametrize("name", TASKS)
def test_each_task_is_in_the_help_and_in_the_reference(name: str) -> None:
    help_of_init = CliRunner().invoke(main, ["init", "--help"]).output
    assert name in "".join(help_of_init.split()), "a line can end after a hyphen"
    assert f"| `{name}` |" in (RUNNER.parent / "docs/reference/tasks.md").read_text("utf-8")


def test_the_file_of_a_task_has_its_name() -> None:
    """Its name in a run file leads to its file."""
    for name in TASKS:
        assert (RUNNER / "tasks" / f"{name.replace('-', '_')}.py").is_file(), name
