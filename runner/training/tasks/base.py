"""What the loop needs of a task."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import nn

from runner.config import RunConfig
from runner.errors import UsageError
from runner.inputs import ModelInput
from runner.training import adapters
from runner.training.batches import Sample

Batch = dict[str, torch.Tensor]


class Task(Protocol):
    """A model with its loss.

    `module(**batch)` returns the loss *summed* over the predictions of the batch, a float32 scalar: the loop divides by
    the number of predictions in the whole step, so that a step means the same however it is split. In evaluation it may
    be a vector, the loss first and then what else `metrics` wants summed.
    """

    module: nn.Module
    model: Any
    note: str

    def __init__(self, config: RunConfig, model: ModelInput, facts: Any) -> None:
        """Args: facts: those of the training store."""
        ...

    def collate(self, rows: Any, samples: list[Sample]) -> Batch:
        """What a store gave for these samples -> the keyword arguments of `module`.

        `labels` is among them, int64 with the samples along its first dimension, -100 where nothing is predicted.
        """
        ...

    def num_predictions(self, batch: Batch) -> int:
        """How many predictions a batch's loss is a sum over."""
        ...

    def num_tokens(self, batch: Batch) -> int:
        """How many real tokens (images, where there are no tokens) a batch holds: none is padding."""
        ...

    def metrics(self, sums: list[float], count: float) -> dict[str, float]:
        """What an evaluation tells.

        Args:
            sums: what `module` gave in evaluation, summed over the whole split.
            count: predictions of the whole split.
        """
        ...


def load_model(
    auto: Any, config: RunConfig, model: ModelInput, *, fresh: tuple[str, ...] = (), **settings: Any
) -> tuple[Any, str]:
    """A transformers model in float32 on the CPU, the same on every rank, and a word on where its weights are from.

    Pretrained weights, or drawn anew from config.json (`init: scratch`). Weights that the checkpoint lacks (a fresh
    head) are drawn from the run's seed. With LoRA, what is not trained is in the precision of the run, or quantised,
    and then on the rank's device already.

    Args:
        auto: the `AutoModelFor...` class.
        fresh: beginnings of names whose weights may have another shape in the checkpoint: they are drawn anew.
        settings: what the config says otherwise than config.json.

    Raises:
        UsageError: weights of the checkpoint do not fit the model of its config.json.
    """
    from transformers import AutoConfig

    if config.model.folder is not None:
        model = replace(model, asset=str(config.model.folder), path=config.model.folder)
    torch.manual_seed(config.seed)
    if config.model.init == "scratch":
        told = AutoConfig.from_pretrained(str(model.path), local_files_only=True, **settings)
        made, origin = auto.from_config(told, dtype=torch.float32), "all weights drawn anew (init: scratch)"
    else:
        made, info = auto.from_pretrained(
            str(model.path),
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=bool(fresh),
            **adapters.loading(config),
            **settings,
        )
        drawn = _drawn(info, model, fresh)
        origin = f"all weights from {model.asset}"
        if drawn:
            origin = (
                f"weights from {model.asset}; {len(drawn)} it does not have are drawn anew: {', '.join(drawn[:3])}..."
            )
        if config.lora is not None:
            origin = f"{origin}; {adapters.attach(made, config, model, drawn, fresh)}"
    if config.activation_checkpointing:
        made.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        made.config.use_cache = False
    made.train()
    return made, origin


def _drawn(info: dict[str, Any], model: ModelInput, fresh: tuple[str, ...]) -> list[str]:
    """The weights that the checkpoint lacks."""
    misfits = sorted(key if isinstance(key, str) else str(key[0]) for key in info["mismatched_keys"])
    if wrong := [name for name in misfits if not name.startswith(fresh or ("\0",))]:
        raise UsageError(
            f"{model.path}: weights do not fit config.json: {wrong[0]}", "Stage weights and config together."
        )
    return sorted({*info["missing_keys"], *misfits})
