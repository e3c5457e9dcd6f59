"""Copies of what a checkpoint holds, in the node's memory: training goes on and does not change them.

Any nesting of dicts, lists and tensors -> the same of copies, good until the same tensors are copied again: the memory
is kept, pinned where there is a GPU, because to allocate it takes longer than to fill it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions


class Stage:
    """The memory that one rank's copies lie in; nothing is taken before the first."""

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=on_gpu,
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=on_gpu,
            )
        )

    def stage(self, state: Any) -> Any:
        """A copy of `state`. Where its tensors were copied before, these copies are overwritten."""
        return self._stager.stage(state)
