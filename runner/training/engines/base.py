"""The seven methods the loop knows of an engine: it neither knows nor asks which one it has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Engine(Protocol):
    """A module spread over the ranks, with its optimizer.

    `backward` takes the sum of losses of one micro batch, scaled so that adding up all micro batches of all ranks gives
    the gradient of the step's mean loss.

    Attributes:
        notes: what it decided by itself, a line each, for printing.
    """

    notes: tuple[str, ...]

    def forward(self, batch: dict[str, torch.Tensor], *, last: bool = True) -> torch.Tensor:
        """The module's output; `last`: its backward will be the step's last one."""
        ...

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        """Adds one micro batch's gradient; `last`: the step's last one."""
        ...

    def step(self, rate: float) -> float:
        """Clips, updates with this learning rate, clears. Returns the gradient's norm before clipping.

        A step whose gradient is no number updates nothing, and has a norm of inf or nan; fp16 halves its loss scale.
        """
        ...

    def save(self, folder: Path) -> None:
        """Writes this rank's part of weights and optimizer state. All ranks call it.

        Raises:
            OSError: it cannot be written.
        """
        ...

    def stage(self, folder: Path, group: dist.ProcessGroup) -> Callable[[], None]:
        """Copies what `save` would write; the function that comes back writes the copy, in another thread.

        All ranks call both, and write before they stage again.

        Args:
            group: of gloo, which only that thread uses meanwhile.

        Raises:
            OSError: it cannot be written.
        """
        ...

    def load(self, folder: Path) -> None:
        """Reads what `save` wrote on any number of ranks. All ranks call it.

        Raises:
            UsageError: this engine cannot read it on another number of ranks.
        """
        ...

    def export(self, *, frozen: bool = True) -> dict[str, Any]:
        """The model's weights on the CPU, by name; empty on all ranks but 0. All ranks call it.

        Args:
            frozen: those too that are not trained.
        """
        ...


def gathered(
    module: nn.Module,
    dtype: torch.dtype,
    whole: Callable[[str, nn.Parameter], torch.Tensor],
    *,
    is_first: bool,
    frozen: bool = True,
) -> dict[str, Any]:
    """Weights in `dtype` and the buffers that are saved, on rank 0's CPU; empty elsewhere.

    Where only some weights are trained, these are small: they stay in float32.

    Args:
        frozen: also what is not trained; without it no buffers either.
        whole: gives a parameter unpartitioned. Called by every rank for every parameter, in the same order: it may
            be a collective.
    """
    state: dict[str, Any] = {}
    adapted = any(not parameter.requires_grad for parameter in module.parameters())
    for name, parameter in module.named_parameters():
        if not (frozen or parameter.requires_grad):
            continue
        full = whole(name, parameter)
        to = torch.float32 if adapted and parameter.requires_grad else dtype
        if is_first:
            state[name] = full.detach().to("cpu", to if full.is_floating_point() else None, copy=True)
    if is_first and frozen:
        kept = module.state_dict().keys()  # without the buffers that are not saved
        state |= {name: buffer.detach().cpu().clone() for name, buffer in module.named_buffers() if name in kept}
    return state
