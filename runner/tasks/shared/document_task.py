"""What the tasks share whose samples are sequences of documents."""

from __future__ import annotations

import math
from collections.abc import Generator
from typing import Any

from runner.config.run_config import RunConfig
from runner.config.task_keys import Column, is_text
from runner.data import tokens
from runner.data.recipe import Recipe
from runner.data.store import Rows, Sample, StoreFacts
from runner.inputs import ModelInput
from runner.tasks.shared.task import Objective, Task

TEXT = Column(
    "text",
    is_text,
    usual=("text", "content"),
    unlikely=lambda values: -sum(map(len, values)),  # the longest texts are the text
)


class DocumentTask(Task):
    """A task on a column of texts; a document is one of them."""

    def samples(self, recipe: Recipe) -> Generator[Sample, None, StoreFacts]:
        if recipe.documents == "joined":
            return tokens.joined(recipe, self.frame)
        return tokens.whole(recipe, tokens.pieces(self.frame), tokens.empty_rows)


class LanguageObjective(Objective[Rows]):
    """The loss over a vocabulary, except what is predicted: a subclass has `collate`.

    Args:
        auto: the class of transformers that loads the model.
        config: the run file, with its precision decided.
        model: the bundle's model.
    """

    rows = staticmethod(Rows.of)

    def __init__(self, auto: Any, config: RunConfig, model: ModelInput) -> None:
        from runner.training.components.language import first_position
        from runner.training.loading import load_model

        self.model, self.note = load_model(auto, config, model)
        self._first = first_position(self.model.config)

    def metrics(self, sums: list[float], count: float) -> dict[str, float]:
        """Loss and perplexity of the validation split."""
        mean = sums[0] / count if count else math.nan  # nothing to predict in texts of one token
        return {"validation_loss": mean, "validation_perplexity": math.exp(min(mean, 700.0))}
