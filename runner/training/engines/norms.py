"""Batch norm in engines that cast every weight to bf16 or fp16: it computes with float32, as under autocast.

FSDP2 and DeepSpeed cast weights and leave running means and variances in float32. torch's batch norm takes both in
16 bits or both in 32, and in 16 bits a running mean cannot move by the small steps it is made of. So the weights are
widened while the layer is at work; what goes in and out of it stays in 16 bits. See adr/0050.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

NOTE = "batch norm: in float32 (its running means and variances move by steps too small for 16 bits)"


def widen_norms(module: nn.Module, precision: str) -> tuple[str, ...]:
    """Makes all batch norm of a module compute with float32 weights and statistics; its parameters stay what they are.

    Args:
        precision: that of the run; nothing is done in fp32.

    Returns:
        What was done, for printing: a line, or none.
    """
    norms = [m for m in module.modules() if isinstance(m, _BatchNorm)] if precision != "fp32" else []
    for norm in norms:
        for name, buffer in norm.named_buffers(recurse=False):
            if buffer.is_floating_point():
                setattr(norm, name, buffer.float())
        norm.forward = partial(_forward, norm, norm.forward)  # type: ignore[method-assign]
    return (NOTE,) if norms else ()


def _forward(norm: nn.Module, own: Callable[..., torch.Tensor], *inputs: Any, **named: Any) -> torch.Tensor:
    """The layer's own forward, which finds its weights widened.

    An attribute of the instance is found before a parameter of that name: parameters, and what an engine has hung on
    them, are not touched, and gradients go through the cast.
    """
    wide = {name: p.float() for name, p in norm.named_parameters(recurse=False)}
    vars(norm).update(wide)
    try:
        return own(*inputs, **named)
    finally:
        for name in wide:
            del vars(norm)[name]
