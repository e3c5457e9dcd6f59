"""A model that classifies, with its loss and what is measured.

In evaluation the module gives sums that can be added over batches and ranks: the loss, the correct
predictions, and for each class how often it was predicted rightly, predicted, and true. Accuracy
and F1 follow from them, so no rank needs the predictions of another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from runner.data.store import IGNORED
from runner.inputs import ModelInput


def padding_id(tokenizer: Any, model: ModelInput) -> int:
    """The id behind the end of a text: the tokenizer's, else the model's, else its end of text.

    Decoders that classify look for the last token before it (transformers'
    modeling_layers.py, GenericForSequenceClassification).
    """
    known = (tokenizer.pad_token_id, model.settings.get("pad_token_id"), tokenizer.eos_token_id)
    return int(next((number for number in known if isinstance(number, int)), 0))


class Classify(nn.Module):
    """A transformers model with its summed loss; in evaluation also what its task's `scores` reads.

    Args:
        model: the transformers model.
        num_classes: of its head.
        smoothing: of the labels, in training.
        prepare: model, inputs of a batch -> the model's inputs; None: they are the same.
        more: predicted classes, labels -> further integers to sum in evaluation, shape (number,).
    """

    def __init__(
        self,
        model: Any,
        num_classes: int,
        smoothing: float = 0.0,
        *,
        prepare: Callable[..., dict[str, torch.Tensor]] | None = None,
        more: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.model, self.num_classes, self._smoothing = model, num_classes, smoothing
        self._prepare, self._more = prepare, more

    def forward(self, labels: torch.Tensor, **inputs: torch.Tensor) -> torch.Tensor:
        """The loss summed over all labels that are not `IGNORED`: a float32 scalar."""
        if self._prepare is not None:
            inputs = self._prepare(self.model, **inputs)
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
        """Correct predictions; per class: correct, predicted, true; what `more` counts. Float32."""
        counted = labels != IGNORED
        # The last class is a bin for what does not count.
        guess = torch.where(counted, predicted, self.num_classes)
        truth = torch.where(counted, labels, self.num_classes)
        right = torch.where(counted & (guess == truth), truth, self.num_classes)
        each = [self._count(classes.flatten())[:-1] for classes in (right, guess, truth)]
        further = [] if self._more is None else [self._more(predicted, labels).float()]
        return torch.cat([each[0].sum().reshape(1), *each, *further])

    def _count(self, classes: torch.Tensor) -> torch.Tensor:
        """How often each class is there. `torch.bincount` would wait for a GPU."""
        none = torch.zeros(self.num_classes + 1, device=classes.device)
        return none.scatter_add(0, classes, torch.ones_like(classes, dtype=none.dtype))
