"""What text-classification and token-classification share: the head, batches, and the loss.

In evaluation the module gives sums that can be added over batches and ranks: the loss, the correct
predictions, and for each class how often it was predicted rightly, predicted, and true. Accuracy
and F1 follow from them, so no rank needs the predictions of another.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from runner.config.run_config import RunConfig
from runner.data.store import Facts, LabelledRows
from runner.data.tokenizing import load_tokenizer
from runner.inputs import ModelInput
from runner.training.components.batches import Sample
from runner.training.tasks.base import IGNORED, Batch, Task, load_model
from runner.training.tasks.language import position_inputs

# First parts of the names of heads (transformers' modeling files): drawn anew for other classes.
HEADS = ("classifier", "score", "classification_head", "logits_proj", "sequence_summary")


class Classification(Task):
    """Both tasks, except what is measured. A head for another number of classes is new.

    Args:
        auto: the `AutoModelFor...` class.
        config: the run file, with its precision decided.
        model: the bundle's model.
        facts: of the training store; its classes are those of all stores.
        settings: values that replace those of config.json.
    """

    def __init__(
        self,
        auto: Any,
        config: RunConfig,
        model: ModelInput,
        facts: Facts,
        **settings: Any,
    ) -> None:
        tokenizer = load_tokenizer(model)
        self.names = facts.class_names
        self._padding = padding_id(tokenizer, model)
        self._has_segments = "token_type_ids" in tokenizer.model_input_names
        self.model, origin = load_model(
            auto,
            config,
            model,
            fresh=HEADS,
            id2label=dict(enumerate(self.names)),
            label2id={name: number for number, name in enumerate(self.names)},
            pad_token_id=self._padding,
            **settings,
        )
        self.module: nn.Module = Classify(self.model, len(self.names), config.label_smoothing)
        self.note = f"{origin}; {len(self.names)} classes"

    def collate(self, rows: LabelledRows, samples: list[Sample]) -> Batch:
        """`labels`: int64 (number,), or (number, longest) with -100 where no word begins.

        Nothing is random.
        """
        documents = torch.from_numpy(rows.documents)
        ids = torch.from_numpy(rows.ids).masked_fill(documents == 0, self._padding)
        batch = {"input_ids": ids, "labels": torch.from_numpy(rows.labels)}
        if self._has_segments:
            batch["token_type_ids"] = (documents - 1).clamp(min=0)
        return batch | position_inputs(rows, 0)

    def metrics(self, sums: list[float], count: float) -> dict[str, float]:
        """Loss, accuracy and F1 of the validation split."""
        return scores(sums, count, len(self.names))


class TextClassification(Classification):
    """The task text-classification, for models of `AutoModelForSequenceClassification`."""

    def __init__(self, config: RunConfig, model: ModelInput, facts: Facts) -> None:
        from transformers import AutoModelForSequenceClassification as auto

        kind = "single_label_classification"
        super().__init__(auto, config, model, facts, problem_type=kind)


def padding_id(tokenizer: Any, model: ModelInput) -> int:
    """The id behind the end of a text: the tokenizer's, else the model's, else its end of text.

    Decoders that classify look for the last token before it (transformers'
    modeling_layers.py, GenericForSequenceClassification).
    """
    known = (tokenizer.pad_token_id, model.settings.get("pad_token_id"), tokenizer.eos_token_id)
    return int(next((number for number in known if isinstance(number, int)), 0))


class Classify(nn.Module):
    """A transformers model with its summed loss; in evaluation also what `scores` reads.

    Args:
        model: the transformers model.
        num_classes: of its head.
        smoothing: of the labels, in training.
    """

    def __init__(self, model: Any, num_classes: int, smoothing: float = 0.0) -> None:
        super().__init__()
        self.model, self.num_classes, self._smoothing = model, num_classes, smoothing

    def forward(self, labels: torch.Tensor, **inputs: torch.Tensor) -> torch.Tensor:
        """The loss summed over all labels that are not `IGNORED`: a float32 scalar."""
        logits = self.model(**inputs).logits.float()
        loss = cross_entropy(
            logits.flatten(0, -2),
            labels.flatten(),
            reduction="sum",
            ignore_index=IGNORED,
            label_smoothing=self._smoothing if self.training else 0.0,
        )
        if self.training:
            return loss
        return torch.cat([loss.reshape(1), self.measures(logits.argmax(-1), labels)])

    def measures(self, predicted: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Correct predictions; then per class: correct, predicted, true. Float32 sums."""
        counted = labels != IGNORED
        # The last class is a bin for what does not count.
        guess = torch.where(counted, predicted, self.num_classes)
        truth = torch.where(counted, labels, self.num_classes)
        right = torch.where(counted & (guess == truth), truth, self.num_classes)
        each = [self._count(classes.flatten())[:-1] for classes in (right, guess, truth)]
        return torch.cat([each[0].sum().reshape(1), *each])

    def _count(self, classes: torch.Tensor) -> torch.Tensor:
        """How often each class is there. `torch.bincount` would wait for a GPU."""
        none = torch.zeros(self.num_classes + 1, device=classes.device)
        return none.scatter_add(0, classes, torch.ones_like(classes, dtype=none.dtype))


def f1(correct: float, predicted: float, true: float) -> float:
    """The harmonic mean of precision and recall; 0 where there is nothing (as scikit-learn)."""
    return 2 * correct / (predicted + true) if predicted + true else 0.0


def scores(sums: list[float], count: float, num_classes: int) -> dict[str, float]:
    """Loss, accuracy and F1 from the sums of `Classify`.

    `validation_f1_macro` is the mean over the classes that occur or are predicted. With two
    classes, `validation_f1` is that of class 1, as GLUE has it.
    """
    loss, right, *rest = sums
    per_class = [rest[n * num_classes : (n + 1) * num_classes] for n in range(3)]
    each = [f1(*numbers) for numbers in zip(*per_class, strict=True)]
    seen = [value for value, p, t in zip(each, *per_class[1:], strict=True) if p or t]
    found = {
        "validation_loss": loss / count if count else math.nan,
        "validation_accuracy": right / count if count else math.nan,
        "validation_f1_macro": sum(seen) / len(seen) if seen else 0.0,
    }
    return found | ({"validation_f1": each[1]} if num_classes == 2 else {})
