"""Causal language modelling: each token is guessed from those before it. Instruction: the same, on what is learned."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from runner.config import RunConfig
from runner.data.store import Rows
from runner.inputs import ModelInput
from runner.training.batches import Sample
from runner.training.tasks import language
from runner.training.tasks.base import Batch, load_model


class CausalLM:
    """Causal-lm and instruction on any model that `AutoModelForCausalLM` knows."""

    def __init__(self, config: RunConfig, model: ModelInput, facts: Any) -> None:
        from transformers import AutoModelForCausalLM

        self.model, self.note = load_model(AutoModelForCausalLM, config, model)
        self.module: nn.Module = _NextToken(self.model)
        self._first = language.first_position(self.model.config)

    def collate(self, rows: Rows, samples: list[Sample]) -> Batch:
        """Nothing is drawn: a sequence is its own label, where it is learned; no document's begin is guessed."""
        ids = torch.from_numpy(rows.ids)
        guessed = rows.learned.copy()
        guessed[:, 1:] &= rows.documents[:, 1:] == rows.documents[:, :-1]
        labels = ids.masked_fill(torch.from_numpy(~guessed), -100)
        return {"input_ids": ids, "labels": labels, **language.places(rows, self._first)}

    def num_predictions(self, batch: Batch) -> int:
        """All learned tokens but the first of each document."""
        return int((batch["labels"][:, 1:] != -100).sum())

    def num_tokens(self, batch: Batch) -> int:
        """Tokens that are no padding."""
        return language.num_tokens(batch)

    def metrics(self, sums: list[float], count: float) -> dict[str, float]:
        """Loss and perplexity."""
        return language.metrics(sums, count)


class _NextToken(language.Language):
    def __init__(self, model: Any) -> None:
        super().__init__(model, causal=True)

    def loss(self, input_ids: torch.Tensor, labels: torch.Tensor, told: dict[str, Any]) -> torch.Tensor:
        logits = self.model(input_ids=input_ids, use_cache=False, **told).logits[:, :-1]
        return cross_entropy(logits.float().flatten(0, 1), labels[:, 1:].flatten(), reduction="sum", ignore_index=-100)
