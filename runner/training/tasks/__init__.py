"""Tasks: each has a model with its loss, and makes batches from samples."""

from __future__ import annotations

from runner.training.tasks.base import Task
from runner.training.tasks.causal_lm import CausalLM
from runner.training.tasks.classification import TextClassification
from runner.training.tasks.image_classification import ImageClassification
from runner.training.tasks.masked_lm import MaskedLM
from runner.training.tasks.token_classification import TokenClassification

__all__ = ["Task", "task_named"]


def task_named(name: str) -> type[Task]:
    """The class for a run file's `task`."""
    tasks: dict[str, type[Task]] = {
        "masked-lm": MaskedLM,
        "causal-lm": CausalLM,
        "instruction": CausalLM,
        "text-classification": TextClassification,
        "token-classification": TokenClassification,
        "image-classification": ImageClassification,
    }
    return tasks[name]
