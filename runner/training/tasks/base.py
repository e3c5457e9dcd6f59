"""What the loop needs of a task."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import nn

from runner.config import RunConfig
from runner.errors import UsageError
from runner.inputs import ModelInput
from runner.training.batches import Sample

Batch = dict[str, torch.Tensor]


class Task(Protocol):
    """A model with its loss.

    `module(**batch)` returns the loss *summed* over the predicted tokens of the batch, a float32 scalar: the loop
    divides by the number of predictions in the whole step, so that a step means the same however it is split.
    """

    module: nn.Module
    model: Any
    note: str

    def __init__(self, config: RunConfig, model: ModelInput) -> None: ...

    def collate(self, rows: Any, samples: list[Sample]) -> Batch:
        """Token ids, int64 (len(samples), sequence_length) -> the keyword arguments of `module`.

        `labels` is among them, of the same shape, -100 where nothing is predicted.
        """
        ...

    def num_predictions(self, batch: Batch) -> int:
        """How many tokens a batch's loss is a sum over."""
        ...


def load_model(auto: Any, config: RunConfig, model: ModelInput) -> tuple[Any, str]:
    """A transformers model in float32 on the CPU, the same on every rank, and a word on where its weights are from.

    Pretrained weights, or drawn anew from config.json (`init: scratch`). Weights that the checkpoint lacks (a fresh
    head) are drawn from the run's seed.

    Args:
        auto: the `AutoModelFor...` class.

    Raises:
        UsageError: weights of the checkpoint do not fit the model of its config.json.
    """
    from transformers import AutoConfig

    if config.model.folder is not None:
        model = replace(model, asset=str(config.model.folder), path=config.model.folder)
    torch.manual_seed(config.seed)
    if config.model.init == "scratch":
        settings = AutoConfig.from_pretrained(str(model.path), local_files_only=True)
        made, origin = auto.from_config(settings, dtype=torch.float32), "all weights drawn anew (init: scratch)"
    else:
        made, info = auto.from_pretrained(
            str(model.path), local_files_only=True, dtype=torch.float32, output_loading_info=True
        )
        origin = _origin(info, model)
    if config.activation_checkpointing:
        made.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        made.config.use_cache = False
    made.train()
    return made, origin


def _origin(info: dict[str, Any], model: ModelInput) -> str:
    if misfits := sorted(map(str, info["mismatched_keys"])):
        raise UsageError(
            f"{model.path}: weights do not fit config.json: {misfits[0]}", "Stage weights and config together."
        )
    fresh = sorted(info["missing_keys"])
    if not fresh:
        return f"all weights from {model.asset}"
    return f"weights from {model.asset}; {len(fresh)} it does not have are drawn anew: {', '.join(fresh[:3])}..."
