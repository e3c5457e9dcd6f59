"""Loss, perplexity or accuracy on the validation split, over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from runner.data.store import IGNORED, Facts, R, Sample
from runner.tasks.shared.objective import Objective
from runner.training.ahead import Ahead, Load
from runner.training.components.batches import evaluation_batches
from runner.training.components.process_group import Ranks
from runner.training.engines.base import Engine
from runner.training.reporting import Totals


class Split(Protocol):
    """What is evaluated: `Stores`, or a part of them."""

    def __len__(self) -> int: ...

    def rows(self, indices: Sequence[int], of: Callable[[Sequence[Sample], Facts], R]) -> R:
        """As `Stores.rows`."""


def evaluate(
    task: Objective[Any],
    engine: Engine,
    store: Split,
    ranks: Ranks,
    micro: int,
    should_stop: Callable[[], bool],
    device: torch.device,
) -> dict[str, float] | None:
    """Evaluates on a whole split. All ranks call it.

    Args:
        task: the model and its loss.
        engine: runs the model.
        store: the validation split.
        ranks: this rank among the others.
        micro: samples per batch of one rank.
        should_stop: is called before each batch; true on one rank stops all ranks, one batch later.
        device: of this rank.

    Returns:
        What `Objective.metrics` returns, for example `validation_loss`; None if it was stopped.
    """
    if ranks.any(should_stop()):
        return None
    batches = _batches(task, store, ranks, micro, device)
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
    task: Objective[Any], store: Split, ranks: Ranks, micro: int, device: torch.device
) -> Ahead[Load]:
    """This rank's batches, one item each."""
    parts = evaluation_batches(len(store), ranks.rank, ranks.world_size, micro)

    def make(number: int) -> Load:
        samples = [sample for sample, _ in parts[number]]
        rows = store.rows([sample.index for sample in samples], task.rows)
        batch = task.collate(rows, samples)
        for row, (_, counts) in enumerate(parts[number]):
            if not counts:
                batch["labels"][row] = IGNORED
        return Load.of([batch], task, device)

    return Ahead(make, len(parts), device)
