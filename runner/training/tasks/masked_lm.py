"""Masked language modelling (BERT, arXiv:1810.04805, 3.1): 15 % of the tokens are to be guessed.

Of these 80 % become [MASK], 10 % another token, 10 % stay. Which ones is drawn anew each epoch, from the sample's own
random numbers. Logits are computed at the guessed positions only, where the model's head can be called by itself: over
a vocabulary of 30,000 that is most of the memory and a good part of the time.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from runner.config import RunConfig
from runner.data.store import Rows
from runner.data.tokenizing import load_tokenizer
from runner.inputs import ModelInput
from runner.training.batches import Sample, sample_rng
from runner.training.tasks import language
from runner.training.tasks.base import Batch, load_model

SHARE = 0.15
# The attribute that holds the head of a masked-lm model, by model type (transformers' modeling files).
HEADS = {"bert": "cls", "roberta": "lm_head", "xlm-roberta": "lm_head", "camembert": "lm_head", "mpnet": "lm_head"}


class MaskedLM:
    """Masked-lm on any model that `AutoModelForMaskedLM` knows."""

    def __init__(self, config: RunConfig, model: ModelInput, facts: Any) -> None:
        from transformers import AutoModelForMaskedLM

        tokenizer = load_tokenizer(model)
        self._seed = config.seed
        self._mask_id = int(tokenizer.mask_token_id or 0)
        self._vocabulary = len(tokenizer)
        self._special = np.array(sorted(set(tokenizer.all_special_ids)), dtype=np.int64)
        self.model, origin = load_model(AutoModelForMaskedLM, config, model)
        head = HEADS.get(self.model.config.model_type)
        self._first = language.first_position(self.model.config)
        self.module: nn.Module = _AtMaskedPlaces(self.model, head) if head else _Everywhere(self.model)
        where = "masked places only" if head else f"every place ({self.model.config.model_type}: no known head)"
        self.note = f"{origin}; logits at {where}"

    def collate(self, rows: Rows, samples: list[Sample]) -> Batch:
        """Draws the masks. `labels` is -100 wherever nothing is to be guessed."""
        ids = rows.ids.copy()
        labels = np.full_like(ids, -100)
        for row, sample in enumerate(samples):
            # Only what is there: a sample is masked alike, however far others in its batch have it padded.
            end = int((rows.documents[row] > 0).sum())
            self._mask(ids[row, :end], labels[row, :end], sample_rng(self._seed, sample))
        told = language.places(rows, self._first)
        return {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels), **told}

    def _mask(self, ids: Any, labels: Any, random: np.random.Generator) -> None:
        """One sequence in place: int64 arrays of shape (sequence_length,)."""
        maskable = ~np.isin(ids, self._special)
        guessed = maskable & (random.random(len(ids)) < SHARE)
        if not guessed.any() and maskable.any():
            guessed[random.choice(np.flatnonzero(maskable))] = True
        labels[guessed] = ids[guessed]
        fate = random.random(len(ids))
        others = random.integers(0, self._vocabulary, len(ids))
        ids[guessed & (fate < 0.8)] = self._mask_id
        swapped = guessed & (fate >= 0.8) & (fate < 0.9)
        ids[swapped] = others[swapped]

    def num_predictions(self, batch: Batch) -> int:
        """Tokens to be guessed."""
        return int((batch["labels"] != -100).sum())

    def num_tokens(self, batch: Batch) -> int:
        """Tokens that are no padding."""
        return language.num_tokens(batch)

    def metrics(self, sums: list[float], count: float) -> dict[str, float]:
        """Loss and perplexity over the guessed tokens."""
        return language.metrics(sums, count)


class _AtMaskedPlaces(language.Language):
    def __init__(self, model: Any, head: str) -> None:
        super().__init__(model, causal=False)
        self._head = head

    def loss(self, input_ids: torch.Tensor, labels: torch.Tensor, told: dict[str, Any]) -> torch.Tensor:
        hidden = getattr(self.model, self.model.base_model_prefix)(input_ids=input_ids, **told)[0]
        guessed = labels != -100
        logits = getattr(self.model, self._head)(hidden[guessed])
        return cross_entropy(logits.float(), labels[guessed], reduction="sum")


class _Everywhere(language.Language):
    def __init__(self, model: Any) -> None:
        super().__init__(model, causal=False)

    def loss(self, input_ids: torch.Tensor, labels: torch.Tensor, told: dict[str, Any]) -> torch.Tensor:
        logits = self.model(input_ids=input_ids, **told).logits
        return cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100)
