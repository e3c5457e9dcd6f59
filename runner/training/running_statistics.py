"""Batch norm's running means and variances: the same on every rank after every step, whatever the engine.

Each rank normalises by its own micro batches, as everywhere; what it keeps for evaluation is averaged over all. Left
alone, DDP would take rank 0's, FSDP2 and DeepSpeed would evaluate with each rank's own and export rank 0's.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


class RunningStatistics:
    """Those of a module; most have none, and then nothing is done."""

    def __init__(self, module: nn.Module) -> None:
        self._norms = [m for m in module.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]

    @torch.no_grad()
    def agree(self) -> None:
        """Averages them over the ranks. All ranks call it, after each step: later would be the same but for rounding.

        A running mean is linear in what went into it, so this is the running mean of the averages.
        """
        buffers = [b for m in self._norms if m.training for b in (m.running_mean, m.running_var) if b is not None]
        if not buffers:
            return
        flat = torch.cat([buffer.float().flatten() for buffer in buffers])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        means = torch.split(flat, [buffer.numel() for buffer in buffers])
        for buffer, mean in zip(buffers, means, strict=True):
            buffer.copy_(mean.view_as(buffer))
