"""A task of one's own: its code says what a sample is, which model is trained, and the losses.

`docs/howto/training/own-task.md` describes the five methods; `runner.data.own.look.METHODS` names
them. Here they become a task that the loop knows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from runner.config.run_config import RunConfig
from runner.data.own.code import own_task, their_code
from runner.data.own.store import OwnFacts
from runner.errors import StageError
from runner.inputs import CodeInput, ModelInput
from runner.plan.plan import sequence_length
from runner.plan.shapes import shape_of
from runner.training.components.batches import Sample, sample_rng
from runner.training.tasks.base import Batch, load_model
from runner.training.tasks.classification import HEADS

IGNORED = -100
COUNT = "count"
"""The tensor of a batch that says how many predictions each sample's loss is the sum of."""
_THEIRS = "their_"  # what their tensors are called on the way through the engine


class OwnTask:
    """A task whose code is in an asset.

    Args:
        config: the run file, with its precision decided.
        model: the bundle's model.
        facts: of the training store.
        code: of the task.
    """

    logits_at_predictions = False

    def __init__(
        self, config: RunConfig, model: ModelInput, facts: OwnFacts, *, code: CodeInput
    ) -> None:
        self._seed, self._code = config.seed, code
        length = sequence_length(config, shape_of(config, model))[0]
        self._theirs = own_task(code, model, length)
        auto, settings = self.model_class(self._theirs, code)
        self.model, origin = load_model(auto, config, model, fresh=HEADS, **settings)
        self._module = _Losses(self.model, self._theirs, code)
        self.module: nn.Module = self._module
        self.note = f"{origin}; {type(self.model).__name__}, losses by {code.task}"

    @staticmethod
    def model_class(theirs: Any, code: CodeInput) -> tuple[Any, dict[str, Any]]:
        """Asks a task for the class of its model, and for settings that replace config.json's.

        Raises:
            StageError: its answer is something else.
        """
        with their_code(code, "the choice of the model"):
            found = theirs.model()
        if (
            not isinstance(found, tuple)
            or len(found) != 2
            or not hasattr(found[0], "from_pretrained")
            or not isinstance(found[1], dict)
        ):
            raise _wrong(code, "model", f"returned {found!r}", "a class and a dict of settings")
        auto, settings = found
        return auto, settings

    def collate(self, rows: list[dict[str, Any]], samples: list[Sample]) -> Batch:
        """Their tensors; and `labels`, the number of predictions of each sample.

        A sample has the same random numbers for each number of ranks.
        """
        random = [sample_rng(self._seed, sample) for sample in samples]
        with their_code(self._code, "a batch"):
            found = self._theirs.batch(rows, random)
        if not isinstance(found, Mapping) or not all(
            isinstance(tensor, torch.Tensor) and len(tensor.shape) and len(tensor) == len(rows)
            for tensor in found.values()
        ):
            raise _wrong(
                self._code,
                "batch",
                f"returned {_shapes(found)}",
                f"tensors by name, whose first size is {len(rows)}: the samples",
            )
        counts = found.get(COUNT, torch.ones(len(rows), dtype=torch.int64))
        others = {f"{_THEIRS}{name}": t for name, t in found.items() if name != COUNT}
        return {"labels": counts.to(torch.int64).clone(), **others}

    def num_predictions(self, batch: Batch) -> int:
        """Without the samples that only fill up a batch of an evaluation."""
        counts = batch["labels"]
        return int(counts[counts != IGNORED].sum())

    def num_tokens(self, batch: Batch) -> int:
        """What `attention_mask` counts, or all of `input_ids`; samples where there is neither."""
        mask = batch.get(f"{_THEIRS}attention_mask")
        ids = batch.get(f"{_THEIRS}input_ids")
        if mask is not None:
            return int(mask.sum())
        return len(batch["labels"]) if ids is None else ids.numel()

    def metrics(self, sums: list[float], count: float) -> dict[str, float]:
        """The mean of each of their values over the predictions of the split."""
        names = self._module.names
        return {f"validation_{name}": s / count for name, s in zip(names, sums, strict=True)}


class _Losses(nn.Module):
    """A transformers model with their loss, summed over the samples that count."""

    def __init__(self, model: Any, theirs: Any, code: CodeInput) -> None:
        super().__init__()
        self.model, self._theirs, self._code = model, theirs, code
        self.names: list[str] = []

    def forward(self, labels: torch.Tensor, **batch: torch.Tensor) -> torch.Tensor:
        """The sum of `loss` in training; in evaluation the sums of all values."""
        theirs = {name.removeprefix(_THEIRS): tensor for name, tensor in batch.items()}
        found = self._theirs.loss(self.model, theirs)
        if (
            not isinstance(found, Mapping)
            or "loss" not in found
            or any(getattr(v, "shape", None) != labels.shape for v in found.values())
        ):
            raise _wrong(
                self._code,
                "loss",
                f"returned {_shapes(found)}",
                f"a dict with `loss`, each value a tensor with {len(labels)} numbers: one per "
                "sample",
            )
        counted = labels != IGNORED
        self.names = ["loss", *(name for name in found if name != "loss")]
        wanted = ["loss"] if self.training else self.names
        sums = [torch.where(counted, found[name].float(), 0.0).sum() for name in wanted]
        return sums[0] if self.training else torch.stack(sums)


def _shapes(found: Any) -> str:
    if not isinstance(found, Mapping):
        return type(found).__name__
    shapes = (
        (name, getattr(value, "shape", type(value).__name__)) for name, value in found.items()
    )
    return ", ".join(f"{n}: {list(s) if isinstance(s, torch.Size) else s}" for n, s in shapes)


def _wrong(code: CodeInput, method: str, found: str, wanted: str) -> StageError:
    return StageError(
        f"{code.path / code.file}: `{code.name}.{method}` {found}; expected {wanted}.",
        "docs/howto/training/own-task.md has an example. Correct the method, and stage the file "
        "again.",
        exit_code=1,
    )
