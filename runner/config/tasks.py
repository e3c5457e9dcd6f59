"""The tasks: the class of transformers that each one trains, and what its data are. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Data = Literal["texts", "chats", "labelled", "images"]


@dataclass(frozen=True)
class TaskKind:
    """What a task is, for everything but its loss.

    Attributes:
        auto: the class of transformers that loads its models.
        table: the part of the name of transformers' table of its model types.
        pipeline: the Hub's name for it.
        data: what its samples are. `labelled`: texts or words with classes.
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


def data_of(task: str) -> Data:
    """Returns what the samples of a task are."""
    return TASKS[task].data
