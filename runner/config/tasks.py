"""The tasks by name, for the keys of a run file.

A task is a plug-in: a file of `runner.tasks`, which is built from `runner.data` and so from this
folder. Nothing here imports it: the files are found by name when the first run file is read.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, Literal


def found_tasks() -> dict[str, Any]:
    """Name -> task. Each folder asks with its own type: what it knows of a task."""
    found: dict[str, Any] = import_module("runner.tasks").TASKS
    return found


def task_names() -> Any:
    """The type of the key `task`: one of these names."""
    return Literal[tuple(found_tasks())]


def those_with(key: str) -> Callable[[], tuple[str, tuple[str, ...]]]:
    """The `only` of a key that some tasks have: `TaskKeys.keys`."""

    def only() -> tuple[str, tuple[str, ...]]:
        return "task", tuple(name for name, task in found_tasks().items() if key in task.keys)

    return only
