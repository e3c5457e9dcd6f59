"""The tasks: the class of transformers that each one trains, and what its data are. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from runner.config.fields import setting
from runner.errors import Lines, UsageError, suggest

Data = Literal["texts", "chats", "labelled", "images", "own"]


@dataclass(frozen=True)
class TaskKind:
    """What a task is, for everything but its loss.

    Attributes:
        auto: the class of transformers that loads its models.
        table: the part of the name of transformers' table of its model types.
        pipeline: the Hub's name for it.
        data: what its samples are. `labelled`: texts or words with classes; `own`: what the code
            of a task of one's own makes of the rows.
    """

    auto: str
    table: str
    pipeline: str
    data: Data


TASKS = {
    "masked-lm": TaskKind("AutoModelForMaskedLM", "MASKED_LM", "fill-mask", "texts"),
    "causal-lm": TaskKind("AutoModelForCausalLM", "CAUSAL_LM", "text-generation", "texts"),
    "instruction": TaskKind("AutoModelForCausalLM", "CAUSAL_LM", "text-generation", "chats"),
    "text-classification": TaskKind(
        "AutoModelForSequenceClassification",
        "SEQUENCE_CLASSIFICATION",
        "text-classification",
        "labelled",
    ),
    "token-classification": TaskKind(
        "AutoModelForTokenClassification",
        "TOKEN_CLASSIFICATION",
        "token-classification",
        "labelled",
    ),
    "image-classification": TaskKind(
        "AutoModelForImageClassification", "IMAGE_CLASSIFICATION", "image-classification", "images"
    ),
}
"""The value of `task` in a run file -> what it is, in the order of the documentation."""

WITH_CLASSES = tuple(TASKS)
"""The tasks whose loss is a cross-entropy over classes, or over the tokens of the vocabulary."""

NAMES = ", ".join(list(TASKS)[:-1]) + f" or {list(TASKS)[-1]}"


OWN = TaskKind("AutoModel", "", "", "own")
"""A task of one's own: `module.Class`."""
_CLASS = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")


def is_own(task: str) -> bool:
    """Returns whether a task is a class of the user's: `my_module.MyTask`."""
    return _CLASS.fullmatch(task) is not None


def is_task(task: str) -> bool:
    """Returns whether a value of `task` can be one."""
    return task in TASKS or is_own(task)


def kind_of(task: str) -> TaskKind:
    """Returns what a task is."""
    return OWN if is_own(task) else TASKS[task]


def data_of(task: str) -> Data:
    """Returns what the samples of a task are."""
    return kind_of(task).data


@dataclass(frozen=True, kw_only=True)
class CodeConfig:
    """The code of a task of one's own: an asset staged with `path:`, and whether it may run."""

    asset: str = setting()
    allow: bool = setting(False, "code runs only where you allow it")


def check_task(task: str, code: CodeConfig | None, smoothing: float, lines: Lines) -> None:
    """Refuses a task that is neither Airlift's nor a class in an asset.

    Raises:
        UsageError: it is not; or the keys do not go together.
    """
    if not is_task(task):
        raise UsageError(
            f"{lines.place('task')}: `task` must be {' | '.join(f'`{name}`' for name in TASKS)}, "
            f"found `{task}`.",
            suggest(
                task, TASKS, "Or a class of yours, as module.Class: docs/howto/training/own-task.md"
            ),
        )
    if is_own(task) and code is None:
        raise UsageError(
            f"{lines.place('task')}: `{task}` is a class of yours, and no asset has its code.",
            f"Stage it (my-code: {{path: {task.rpartition('.')[0].replace('.', '/')}.py}}), and "
            "write code: {asset: my-code, allow: true}",
        )
    if not is_own(task) and code is not None:
        raise UsageError(
            f"{lines.place('code')}: task {task} runs no code of yours.",
            "Remove `code`, or set task: module.Class",
        )
    if is_own(task) and smoothing:
        raise UsageError(
            f"{lines.place('label_smoothing')}: the loss of `{task}` is in its own code.",
            "Remove label_smoothing; smooth in `loss`.",
        )
