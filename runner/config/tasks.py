"""What a run file asks of its task, by the task's name.

The files of `runner.tasks` are built from `runner.data`, and so from this folder. They are loaded
when the first run file is read: a module here that loaded them would need itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from runner.tasks import Task


def task_named(name: str) -> Task:
    """Returns the task for a run file's `task`."""
    from runner.tasks import TASKS

    return TASKS[name]


def task_names() -> Any:
    """The type of the key `task`: one of these names."""
    from runner.tasks import TASKS

    return Literal[tuple(TASKS)]


def those_with(key: str) -> Callable[[], tuple[str, tuple[str, ...]]]:
    """The `only` of a key that some tasks have: `Task.keys`."""

    def only() -> tuple[str, tuple[str, ...]]:
        from runner.tasks import TASKS

        return "task", tuple(name for name, task in TASKS.items() if key in task.keys)

    return only
