"""Causal language modelling: each token is guessed from those before it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from runner.config import RunConfig
from runner.inputs import ModelInput
from runner.training.batches import Sample
from runner.training.tasks.base import Batch, load_model


class CausalLM:
    """Causal-lm on any model that `AutoModelForCausalLM` knows."""

    def __init__(self, config: RunConfig, model: ModelInput) -> None:
        from transformers import AutoModelForCausalLM

        self.model, self.note = load_model(AutoModelForCausalLM, config, model)
        self.module: nn.Module = _NextToken(self.model)

    def collate(self, rows: Any, samples: list[Sample]) -> Batch:
        """Nothing is drawn: the sequence is its own label."""
        ids = torch.from_numpy(np.array(rows, dtype=np.int64))
        return {"input_ids": ids, "labels": ids.clone()}

    def num_predictions(self, batch: Batch) -> int:
        """All tokens but the first of each sequence."""
        return int((batch["labels"][:, 1:] != -100).sum())


class _NextToken(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.model(input_ids=input_ids, use_cache=False).logits[:, :-1]
        return cross_entropy(logits.float().flatten(0, 1), labels[:, 1:].flatten(), reduction="sum", ignore_index=-100)
