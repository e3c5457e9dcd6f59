"""What the language tasks share: what a model has to be told so that a token sees its own document and nothing else.

Documents `joined` need nothing. Those that lie `alone` in a row are padded: an attention mask. `separate` ones lie side
by side: positions begin anew with each, and a block-diagonal mask, because BERT does not read documents off positions.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from runner.data.store import Rows
from runner.training.tasks.base import Batch

# Positions of these begin after the padding index (modeling_roberta.py, create_position_ids_from_input_ids).
_AFTER_PADDING = ("roberta", "xlm-roberta", "camembert")


def first_position(settings: Any) -> int:
    """The position of a document's first token, in a model's `config`."""
    return settings.pad_token_id + 1 if settings.model_type in _AFTER_PADDING else 0


def places(rows: Rows, first: int) -> Batch:
    """The keyword arguments that say where tokens are: int64 tensors of shape (rows, longest)."""
    if rows.layout == "joined":
        return {}
    if rows.layout == "alone":
        return {"attention_mask": torch.from_numpy((rows.documents > 0).astype(np.int64))}
    positions = np.where(rows.documents > 0, _positions(rows.documents) + first, 0)
    return {"documents": torch.from_numpy(rows.documents), "position_ids": torch.from_numpy(positions)}


def _positions(documents: NDArray[np.int64]) -> NDArray[np.int64]:
    """How far each token is from the begin of its document; shape as given."""
    everywhere = np.arange(documents.shape[1])
    begins = np.ones_like(documents, dtype=bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return everywhere - np.maximum.accumulate(np.where(begins, everywhere, 0), axis=1)


def num_tokens(batch: Batch) -> int:
    """Tokens that are no padding."""
    for name in ("attention_mask", "documents"):
        if name in batch:
            return int((batch[name] > 0).sum())
    return batch["input_ids"].numel()


def metrics(sums: list[float], count: float) -> dict[str, float]:
    """Loss and perplexity of the validation split."""
    mean = sums[0] / count if count else math.nan  # texts of one token leave nothing to guess
    return {"validation_loss": mean, "validation_perplexity": math.exp(min(mean, 700.0))}


class Language(nn.Module):
    """A transformers model that is told where documents are; a subclass says what is learned."""

    def __init__(self, model: Any, *, causal: bool) -> None:
        super().__init__()
        self.model, self._causal = model, causal

    def forward(
        self,
        input_ids: torch.Tensor,
        labels: torch.Tensor,
        documents: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The summed loss of a batch: int64 tensors of shape (rows, longest) -> a float32 scalar."""
        return self.loss(input_ids, labels, self.told(documents, position_ids, attention_mask))

    def loss(self, input_ids: torch.Tensor, labels: torch.Tensor, told: dict[str, Any]) -> torch.Tensor:
        """The loss summed over all labels that are not -100.

        Args:
            told: the model's keyword arguments beside `input_ids`.
        """
        raise NotImplementedError

    def told(
        self,
        documents: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        attention_mask: torch.Tensor | None,
    ) -> dict[str, Any]:
        """Keyword arguments of the model, from those of a batch."""
        if documents is None:
            return {} if attention_mask is None else {"attention_mask": attention_mask}
        return {"position_ids": position_ids, "attention_mask": self._mask(documents)}

    def _mask(self, documents: torch.Tensor) -> torch.Tensor:
        """Who sees whom: shape (rows, 1, longest, longest). transformers takes a mask of four dimensions as it is."""
        sees = documents[:, None, :, None] == documents[:, None, None, :]
        if self._causal:
            sees = sees.tril()
        if self.model.config._attn_implementation == "sdpa":
            return sees
        # Written out, attention adds its mask to the scores.
        dtype = self.model.dtype
        return torch.zeros(sees.shape, dtype=dtype, device=sees.device).masked_fill(~sees, torch.finfo(dtype).min)
