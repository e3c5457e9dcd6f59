"""Loss, perplexity or accuracy on the validation split, over all ranks, the same way every time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from runner.training.batches import evaluation_batches
from runner.training.engines.base import Engine
from runner.training.ranks import Ranks
from runner.training.tasks import Task


def evaluate(
    task: Task, engine: Engine, store: Any, ranks: Ranks, micro: int, should_stop: Callable[[], bool]
) -> dict[str, float] | None:
    """Reads a whole split. All ranks call it.

    Args:
        store: the validation split.
        micro: samples at a time.
        should_stop: asked before each batch; true on one rank ends it on all.

    Returns:
        What `Task.metrics` makes of it: `validation_loss` and the like; None if it was stopped.
    """
    module: Any = task.module
    module.eval()
    try:
        sums: list[float] = []
        count = 0
        with torch.no_grad():
            for part in evaluation_batches(len(store), ranks.rank, ranks.world_size, micro):
                if ranks.any(should_stop()):
                    return None
                samples = [sample for sample, _ in part]
                batch = task.collate(store.rows([sample.index for sample in samples]), samples)
                for row, (_, counts) in enumerate(part):
                    if not counts:
                        batch["labels"][row] = -100
                found = engine.forward(batch).float().reshape(-1).tolist()
                sums = [a + b for a, b in zip(sums or [0.0] * len(found), found, strict=True)]
                count += task.num_predictions(batch)
    finally:
        module.train()
    *totals, predictions = ranks.total(*sums, count)
    return task.metrics(totals, predictions)
