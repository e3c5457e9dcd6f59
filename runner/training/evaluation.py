"""Loss, perplexity or accuracy on the validation split, over all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from runner.data.store import IGNORED, Stores
from runner.tasks.shared.objective import Objective
from runner.training.ahead import Ahead, Load
from runner.training.components.batches import SamplePlace, evaluation_batches
from runner.training.components.process_group import Ranks
from runner.training.engines.base import Engine
from runner.training.reporting import Totals


def evaluate(
    task: Objective[Any],
    engine: Engine,
    store: Stores,
    ranks: Ranks,
    micro: int,
    should_stop: Callable[[], bool],
    device: torch.device,
    most: int | None = None,
) -> dict[str, float] | None:
    """Evaluates on a split. All ranks call it.

    Args:
        task: the model and its loss.
        engine: runs the model.
        store: the validation split.
        ranks: this rank among the others.
        micro: samples per batch of one rank.
        should_stop: is called before each batch; true on one rank stops all ranks, one batch later.
        device: of this rank.
        most: the first samples of the split that are read; None: all.

    Returns:
        What `Objective.metrics` returns, for example `validation_loss`; None if it was stopped.
    """
    if ranks.any(should_stop()):
        return None
    number = len(store) if most is None else min(most, len(store))
    parts = evaluation_batches(number, ranks.rank, ranks.world_size, micro)
    batches = _batches(task, store, parts, device)
    module: Any = task.module
    module.eval()
    try:
        sums, count = torch.zeros(1, dtype=torch.float64, device=device), 0
        stopping: Totals | None = None
        with torch.no_grad():
            for number in range(batches.end):
                flag = Totals(ranks, device, (), [should_stop()])
                if stopping is not None and stopping.read()[0]:
                    flag.read()
                    return None
                stopping = flag
                load = batches.take(number)
                sums = sums + engine.forward(load.on(device)[0]).reshape(-1).double()
                count += load.predictions
        if stopping is not None:
            stopping.read()  # no sum stays on its way: the process may end next
    finally:
        module.train()
        batches.close()
    *totals, predictions = ranks.total(*sums.tolist(), count)
    return task.metrics(totals, predictions)


def _batches(
    task: Objective[Any],
    store: Stores,
    parts: list[list[tuple[SamplePlace, bool]]],
    device: torch.device,
) -> Ahead[Load]:
    """This rank's batches, one item each; `parts` as `evaluation_batches` gives them."""

    def make(number: int) -> Load:
        samples = [sample for sample, _ in parts[number]]
        rows = store.rows([sample.index for sample in samples], task.rows)
        batch = task.collate(rows, samples)
        for row, (_, counts) in enumerate(parts[number]):
            if not counts:
                batch["labels"][row] = IGNORED
        return Load.of([batch], task, device)

    return Ahead(make, len(parts), device)
