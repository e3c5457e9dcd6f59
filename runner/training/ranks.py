"""What a rank needs of the others besides the engine: agreeing, waiting, sharing small facts.

Everything goes over a gloo group of its own, so that it works the same on GPUs and CPUs and never touches a device.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from runner.launch import RankEnvironment

T = TypeVar("T")
_LOST = (
    "connection closed",
    "connection reset",
    "connection refused",
    "broken pipe",
    "timed out",
    "timeout",
    "got 0 bytes",
    "ncclremoteerror",
    "remote process exit",
    "communicator was aborted",
)
PATIENCE = timedelta(hours=1)  # a rank may be busy writing a large checkpoint

SILENCE = timedelta(minutes=30)  # of a rank within a step, before the others give it up


def join(engine: str, device: str, place: RankEnvironment, meeting_file: str | None) -> None:
    """Joins the other ranks, once a process. Must come before DeepSpeed is imported: it looks for its accelerator then.

    Args:
        engine: `engine.name` of the run file.
        device: `cuda` or `cpu`.
        meeting_file: where ranks on one machine meet; None: at MASTER_ADDR and MASTER_PORT.
    """
    if dist.is_initialized():
        return
    if device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
        backend = "gloo"
    else:
        # What FSDP offloads is added up on the CPU; DeepSpeed wants to know of one backend only.
        backend = "nccl" if engine == "deepspeed" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(
        backend,
        init_method=f"file://{meeting_file}" if meeting_file else None,
        rank=place.rank,
        world_size=place.world_size,
        timeout=SILENCE,
    )


def is_lost_peer(error: RuntimeError) -> bool:
    """Whether a collective failed because another rank is gone: gloo and NCCL say it in words only.

    NCCL's errors are of one kind, be it that (`ncclRemoteError`: nccl.h; its detail names the socket) or a fault of
    this rank's own, which has to be told as it is.
    """
    said = str(error).lower()
    return any(words in said for words in _LOST)


class Ranks:
    """This rank among all of them. Made by all ranks at the same time; for one thread at a time.

    Attributes:
        group: the gloo group of its own.
    """

    def __init__(self) -> None:
        self.group = dist.new_group(backend="gloo", timeout=PATIENCE)
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
        dist.all_reduce(tensor, group=self.group)
        return tensor.tolist()

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in order, on every rank."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def barrier(self) -> None:
        """Waits for all."""
        dist.barrier(group=self.group)
