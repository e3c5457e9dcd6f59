"""Causal language modelling: predict each token from those before it; `instruction` too."""

from __future__ import annotations

from operator import methodcaller
from typing import Any

import torch

from runner.config.run_config import RunConfig
from runner.data.store import Rows
from runner.inputs import ModelInput
from runner.training.components.batches import Sample
from runner.training.tasks import flex, language
from runner.training.tasks.base import IGNORED, Batch

# Model types whose logits are their output embedding applied to their hidden states, and no more
# (transformers' modeling files). tests/runner/training/tasks/test_language.py tests each of them.
HEADS = frozenset({"gpt2", "gpt_neox", "llama", "mistral", "phi3", "qwen2", "qwen3"})


class CausalLM(language.LanguageTask):
    """The tasks causal-lm and instruction, for any model that `AutoModelForCausalLM` loads."""

    logits_at_predictions = False

    def __init__(self, config: RunConfig, model: ModelInput, facts: Any) -> None:
        from transformers import AutoModelForCausalLM

        super().__init__(AutoModelForCausalLM, config, model)
        known = self.model.config.model_type in HEADS
        head = methodcaller("get_output_embeddings") if known else None
        self.module = language.Language(
            self.model, causal=True, head=head, smoothing=config.label_smoothing
        )
        self._in_blocks = False
        if getattr(facts, "documents", None) == "separate":
            self._in_blocks, note = flex.choose(self.model, flex.capability())
            self.note = f"{self.note}; {note}"
        if self._in_blocks:
            self.model.set_attn_implementation("flex_attention")

    def collate(self, rows: Rows, samples: list[Sample]) -> Batch:
        """Builds the labels: the sequence itself, where it is learned. Nothing is random.

        The first token of a document is not predicted.
        """
        in_blocks = self._in_blocks and rows.layout == "separate"
        rows = flex.whole_blocks(rows) if in_blocks else rows
        ids = torch.from_numpy(rows.ids)
        guessed = rows.learned.copy()
        guessed[:, 0] = False
        guessed[:, 1:] &= rows.documents[:, 1:] == rows.documents[:, :-1]
        labels = ids.masked_fill(torch.from_numpy(~guessed), IGNORED)
        batch = {"input_ids": ids, "labels": labels}
        if in_blocks:
            batch["blocks"] = torch.from_numpy(flex.blocks_of(rows.documents))
        return batch | language.position_inputs(rows, self._first)
