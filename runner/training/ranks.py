"""What a rank needs of the others besides the engine: agreeing, waiting, sharing small facts.

Everything goes over a gloo group of its own, so that it works the same on GPUs and CPUs and never touches a device.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")
PATIENCE = timedelta(hours=1)  # a rank may be busy writing a large checkpoint


def is_lost_peer(error: RuntimeError) -> bool:
    """Whether a collective failed because another rank is gone: gloo and NCCL say it in words only."""
    said = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection refused", "Timed out")
    return any(words in str(error) for words in said) or isinstance(error, dist.DistBackendError)


class Ranks:
    """This rank among all of them."""

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo", timeout=PATIENCE)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes what is written once."""
        return self.rank == 0

    def any(self, flag: bool) -> bool:
        """Whether it is true on any rank."""
        return self.total(int(flag))[0] > 0

    def total(self, *values: float) -> list[float]:
        """Sums over all ranks, in float64."""
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, group=self._group)
        return tensor.tolist()

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in order, on every rank."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def barrier(self) -> None:
        """Waits for all."""
        dist.barrier(group=self._group)
