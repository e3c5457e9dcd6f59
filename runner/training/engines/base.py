"""The six methods that the loop uses of an engine. The loop does not know which engine it has."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor


class Engine(Protocol):
    """A module spread over the ranks, with its optimizer.

    Attributes:
        notes: what it decided automatically, one line each, for printing.
    """

    notes: tuple[str, ...]

    def forward(self, batch: dict[str, torch.Tensor], *, last: bool = True) -> torch.Tensor:
        """The module's output. `last`: the step's last backward will follow."""
        ...

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        """Adds the gradient of one micro batch.

        Args:
            loss: the sum of the micro batch's losses, scaled so that the sum over all micro batches
                of all ranks is the gradient of the step's mean loss.
            last: whether it is the step's last one.
        """
        ...

    def step(self, rate: float) -> float | torch.Tensor:
        """Clips gradients, updates weights and clears gradients.

        A step whose gradient is not finite updates nothing. Then the norm is inf or nan, and fp16
        halves its loss scale.

        Args:
            rate: the learning rate of this step.

        Returns:
            The gradient's norm before clipping; a scalar on the device where the host need not
            wait for it.
        """
        ...

    def save(self, folder: Path) -> None:
        """Writes this rank's part of weights and optimizer state. All ranks call it.

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
        """The model's weights on rank 0's CPU, by name; empty on other ranks. All ranks call it.

        Args:
            frozen: whether weights that are not trained are included.
        """
        ...


def clip(parameters: Iterable[nn.Parameter], most: float) -> torch.Tensor:
    """Scales gradients down, in place, to a global norm.

    Args:
        parameters: those without a gradient do not count.
        most: the largest norm; 0: no clipping.

    Returns:
        The norm before, a scalar on the device.
    """
    trained = [p for p in parameters if p.grad is not None]
    norm = torch.nn.utils.get_total_norm([p.grad for p in trained if p.grad is not None])
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    if most:
        torch.nn.utils.clip_grads_with_norm_(trained, most, norm)
    return norm


def gathered(
    module: nn.Module,
    dtype: torch.dtype,
    whole: Callable[[str, nn.Parameter], torch.Tensor],
    *,
    is_first: bool,
    frozen: bool = True,
) -> dict[str, Any]:
    """Weights in `dtype` and the saved buffers, on rank 0's CPU; empty on other ranks.

    Where only some weights are trained, these are small and stay in float32.

    Args:
        module: the model with its loss.
        dtype: of the exported weights.
        whole: returns a parameter unpartitioned. Every rank calls it for every parameter in the
            same order, so it may be a collective.
        is_first: whether this is rank 0.
        frozen: whether weights that are not trained are included; without them no buffers either.
    """
    state: dict[str, Any] = {}
    adapted = any(not parameter.requires_grad for parameter in module.parameters())
    for name, parameter in module.named_parameters():
        if not (frozen or parameter.requires_grad):
            continue
        full = whole(name, parameter)
        to = torch.float32 if adapted and parameter.requires_grad else dtype
        if is_first:
            state[name] = full.detach().to(
                "cpu", to if full.is_floating_point() else None, copy=True
            )
    if is_first and frozen:
        kept = module.state_dict().keys()  # omits the buffers that are not saved
        state |= {
            name: buffer.detach().cpu().clone()
            for name, buffer in module.named_buffers()
            if name in kept
        }
    return state
