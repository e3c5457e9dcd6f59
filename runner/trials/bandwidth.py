"""All ranks of a job add up once, as in a training step: do they meet, and how fast is it."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from runner.config.run_config import RunConfig
from runner.launch.rank_process import Rank
from runner.training.components.device import find_device
from runner.training.components.process_group import meet, open_store

BYTES = {"cuda": 2**28, "cpu": 2**24}
TIMES = 3


def all_reduce(config: RunConfig, rank: Rank) -> dict[str, Any]:
    """Joins the other ranks, and adds up a vector over all of them.

    Returns:
        `ranks`, `backend`, `bytes`, `seconds` of the fastest, and `GB/s` per rank: what each sends
        and receives (2 (n - 1) / n of the vector).

    Raises:
        StageError: the ranks cannot meet.
    """
    info = rank.info
    device, _ = find_device(info.local_rank, info.local_world_size, config.slurm)
    meet(rank, open_store(rank), config.engine.name, device.type)
    size = BYTES[device.type]
    vector = torch.ones(size // 4, device=device)
    least = float("inf")
    for _ in range(TIMES + 1):  # the first one connects
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(vector)
        if device.type == "cuda":
            torch.cuda.synchronize()
        least = min(least, time.perf_counter() - began)
    ranks = info.world_size
    moved = 2 * (ranks - 1) / ranks * size
    backend = dist.get_backend()
    dist.destroy_process_group()
    return {
        "ranks": ranks,
        "backend": backend,
        "bytes": size,
        "seconds": least,
        "GB/s": moved / least / 1e9,
    }
