"""The five methods the loop knows of an engine: it neither knows nor asks which one it has."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch


class Engine(Protocol):
    """A module spread over the ranks, with its optimizer.

    `backward` takes the sum of losses of one micro batch, scaled so that adding up all micro batches of all ranks gives
    the gradient of the step's mean loss.
    """

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """The module's output."""
        ...

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        """Adds one micro batch's gradient; `last`: the step's last one."""
        ...

    def step(self, rate: float) -> float:
        """Clips, updates with this learning rate, clears. Returns the gradient's norm before clipping."""
        ...

    def save(self, folder: Path) -> None:
        """Writes this rank's part of weights and optimizer state. All ranks call it."""
        ...

    def load(self, folder: Path) -> None:
        """Reads what `save` wrote, at the same world size. All ranks call it."""
        ...

    def export(self) -> dict[str, Any]:
        """The whole model's weights on the CPU, by name; empty on all ranks but 0. All ranks call it."""
        ...
