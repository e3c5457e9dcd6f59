"""Batch norm in 16-bit engines, and its running statistics over several ranks.

`widen_norms`: FSDP2 and DeepSpeed cast every weight to bf16 or fp16 and leave running means and
variances in float32. torch's batch norm needs both in 16 bits or both in 32, and in 16 bits a
running mean cannot move by its small steps. So the weights are float32 while the layer computes, as
under autocast. Its input and output stay in 16 bits (docs/adr/0013).

`RunningStatistics`: each rank normalises by its own micro batches. After every step the running
means and variances are averaged over the ranks, so evaluation and export are the same on every rank
and with every engine. Otherwise DDP would take rank 0's, and FSDP2 and DeepSpeed would evaluate
with each rank's own and export rank 0's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

NOTE = (
    "batch norm: in float32 (its running means and variances move by steps too small for 16 bits)"
)


def widen_norms(module: nn.Module, precision: str) -> tuple[str, ...]:
    """Makes all batch norm of a module compute in float32. Parameters keep their type.

    Args:
        module: the model.
        precision: of the run; fp32 needs nothing.

    Returns:
        What was done, for printing: one line or none.
    """
    norms = (
        [m for m in module.modules() if isinstance(m, _BatchNorm)] if precision != "fp32" else []
    )
    for norm in norms:
        for name, buffer in norm.named_buffers(recurse=False):
            if buffer.is_floating_point():
                setattr(norm, name, buffer.float())
        norm.forward = partial(_forward, norm, norm.forward)  # type: ignore[method-assign]
    return (NOTE,) if norms else ()


def _forward(
    norm: nn.Module, original: Callable[..., torch.Tensor], *inputs: Any, **named: Any
) -> torch.Tensor:
    """The layer's own forward, with its weights in float32.

    Python finds an attribute of the instance before a parameter of the same name. So parameters,
    and the hooks that an engine has put on them, are not changed, and gradients flow through the
    cast.
    """
    wide = {name: p.float() for name, p in norm.named_parameters(recurse=False)}
    vars(norm).update(wide)
    try:
        return original(*inputs, **named)
    finally:
        for name in wide:
            del vars(norm)[name]


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
