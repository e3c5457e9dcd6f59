"""The tasks: one file each, which says all that makes it another task than the others.

Its columns, how a row becomes a sample, batches, the loss and its measures, its models, and what
`runner check` asks. All other code asks `TASKS[config.task]` and compares no names. To add a task,
add a file with a `TASK`. What several tasks share is in `runner.tasks.shared`; what they are built
from is in `runner.data` and `runner.training.components`.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from runner.tasks.shared.task import Task

__all__ = ["TASKS", "Task", "has_model", "task_named"]


def _read() -> dict[str, Task]:
    # The files of this folder are the list: a list beside them would be a second place to change.
    files = [file.name for file in iter_modules(__path__) if not file.ispkg]
    found: list[Task] = [import_module(f"{__name__}.{name}").TASK for name in files]
    return {task.name: task for task in sorted(found, key=lambda task: task.place)}


TASKS = _read()
"""The value of `task` in a run file -> what it is, in the order of the documentation."""


def task_named(name: str) -> Task:
    """Returns the task for a run file's `task`."""
    return TASKS[name]


def has_model(task: Task, model_type: object) -> bool:
    """Whether transformers has models of a type for a task.

    The types are those of one version of transformers. Of a type that no task has, another version
    may know more: it is left to transformers itself.

    Args:
        model_type: as in config.json.
    """
    is_known = any(model_type in other.model_types for other in TASKS.values())
    return model_type in task.model_types or not is_known
