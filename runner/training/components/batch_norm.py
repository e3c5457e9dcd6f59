"""Batch norm: its running statistics over several ranks, and where it is refused.

`RunningStatistics`: each rank normalises by its own micro batches. After every step the running
means and variances are averaged over the ranks, so evaluation and export are the same on every rank
and with every engine. Otherwise DDP would take rank 0's, and FSDP2 and DeepSpeed would evaluate
with each rank's own and export rank 0's.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from runner.config.run_config import RunConfig
from runner.errors import UsageError


def check_batch_norm(module: nn.Module, config: RunConfig, precision: str) -> None:
    """Refuses batch norm whose weights the engine casts to 16 bits.

    torch's takes no weights of 16 bits beside running statistics of 32, and in 16 bits a running
    mean cannot move by its small steps. DDP computes under autocast, which keeps it in float32.

    Raises:
        UsageError: the engine would cast the weights of the module's batch norm.
    """
    casts = precision != "fp32" and config.engine.name != "ddp"
    if casts and any(isinstance(m, _BatchNorm) for m in module.modules()):
        raise UsageError(
            f"{config.place('engine.name')}: this model has batch norm, which cannot be trained "
            f"in {precision} with {config.engine.name}.",
            "Set engine: {name: ddp}, or precision: fp32.",
        )


class RunningStatistics:
    """The running means and variances of a module's batch norm, if it has any."""

    def __init__(self, module: nn.Module) -> None:
        self._norms = [
            m for m in module.modules() if isinstance(m, _BatchNorm) and m.track_running_stats
        ]

    @torch.no_grad()
    def agree(self) -> None:
        """Averages them over the ranks. All ranks call it after each step.

        A running mean is linear in its inputs, so this is the running mean of the averages.
        """
        buffers = [
            b
            for m in self._norms
            if m.training
            for b in (m.running_mean, m.running_var)
            if b is not None
        ]
        if not buffers:
            return
        flat = torch.cat([buffer.float().flatten() for buffer in buffers])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        means = torch.split(flat, [buffer.numel() for buffer in buffers])
        for buffer, mean in zip(buffers, means, strict=True):
            buffer.copy_(mean.view_as(buffer))
