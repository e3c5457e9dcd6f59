"""What the loop needs of a task in a rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

from runner.data.store import IGNORED, Sample, StoreFacts

if TYPE_CHECKING:
    import torch
    from torch import nn

    from runner.training.components.batches import SamplePlace

Batch: TypeAlias = "dict[str, torch.Tensor]"
R = TypeVar("R")


class Objective(Generic[R]):
    """A model with its loss; `R` is what a batch is made of.

    `module(**batch)` returns the loss *summed* over the predictions of the batch, a float32 scalar.
    The loop divides it by the number of predictions of the whole step, so a step is the same
    however it is split. In evaluation it may be a vector: the loss, then what else `metrics` needs
    summed.

    Attributes:
        module: has the loss; the engine runs it.
        model: the transformers model inside.
        note: where the weights come from, for printing.
        logits_at_predictions: logits are computed only where something is predicted.
        rows: makes arrays of samples of a store, padded to the longest of them.
    """

    module: nn.Module
    model: Any
    note: str
    logits_at_predictions: bool = True
    rows: Callable[[Sequence[Sample], StoreFacts], R]

    def collate(self, rows: R, samples: list[SamplePlace]) -> Batch:
        """Makes the keyword arguments of `module`.

        Args:
            rows: those of these samples.
            samples: which they are.

        Returns:
            Tensors by name. `labels` is int64 with samples along its first dimension, and -100
            where nothing is predicted.
        """
        raise NotImplementedError

    def num_predictions(self, batch: Batch) -> int:
        """How many predictions a batch's loss is the sum of."""
        return int((batch["labels"] != IGNORED).sum())

    def num_tokens(self, batch: Batch) -> int:
        """Tokens of a batch without padding; images where there are no tokens."""
        for name in ("attention_mask", "documents"):
            if name in batch:
                return int((batch[name] > 0).sum())
        return batch["input_ids"].numel()

    def metrics(self, sums: list[float], count: float) -> dict[str, float]:
        """The measures of an evaluation.

        Args:
            sums: what `module` gave in evaluation, summed over the whole split.
            count: predictions of the whole split.
        """
        raise NotImplementedError
