"""Text classification: one class for each text, or for each pair of texts (GLUE)."""

from __future__ import annotations

from runner.config.run_config import RunConfig
from runner.data.store import Facts
from runner.inputs import ModelInput
from runner.training.tasks.classification import Classification, scores


class TextClassification(Classification):
    """The task text-classification, for models of `AutoModelForSequenceClassification`."""

    def __init__(self, config: RunConfig, model: ModelInput, facts: Facts) -> None:
        from transformers import AutoModelForSequenceClassification

        super().__init__(
            AutoModelForSequenceClassification,
            config,
            model,
            facts,
            problem_type="single_label_classification",
        )

    def metrics(self, sums: list[float], count: float) -> dict[str, float]:
        """Loss, accuracy and F1 of the validation split."""
        return scores(sums, count, len(self.names))
