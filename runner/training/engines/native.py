"""What DDP and FSDP2 share: torch's optimizers and loss scaling, for whole parameters or DTensors.

Master weights, gradients and moments are float32 in every precision; bf16 and fp16 are only for
computing. A checkpoint is one of torch.distributed.checkpoint, by parameter name: DDP and FSDP2
read each other's, on any number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from runner.config.run_config import RunConfig
from runner.job.plan import TrainingPlan
from runner.training.components.device import DTYPES
from runner.training.components.optimization import make_optimizer, skips_on_device
from runner.training.engines import dcp
from runner.training.engines.base import clip, gathered

FOLDER = "engine"


class NativeEngine:
    """The loop's protocol, except how the module is spread: a subclass makes `wrapped`.

    Args:
        module: has the names and the weights.
        wrapped: is called.
        config: the run file.
        plan: precision, batch sizes and offload of the run.
        device: of this rank.
    """

    notes: tuple[str, ...] = ()

    def __init__(
        self,
        module: nn.Module,
        wrapped: nn.Module,
        config: RunConfig,
        plan: TrainingPlan,
        device: torch.device,
    ) -> None:
        self._module, self._wrapped, self._plan, self._device = module, wrapped, plan, device
        self._clip = config.optimizer.clip
        # Read once: between forward and backward FSDP2 has the gathered weights under the same
        # names.
        self._parameters = dict(module.named_parameters())
        self._optimizer = make_optimizer(module, config.optimizer)
        self._scaler = torch.amp.GradScaler(device.type, enabled=plan.precision == "fp16")

    def forward(self, batch: Mapping[str, torch.Tensor], *, last: bool = True) -> torch.Tensor:
        return self._wrapped(**{name: tensor.to(self._device) for name, tensor in batch.items()})  # type: ignore[no-any-return]

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        # DDP and FSDP2 average over ranks; the loop has scaled for the sum.
        scaled: torch.Tensor = self._scaler.scale(loss * self._plan.world_size)
        scaled.backward()  # type: ignore[no-untyped-call]

    def step(self, rate: float) -> torch.Tensor:
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._scaler.unscale_(self._optimizer)
        norm = clip(self._parameters.values(), self._clip)
        self._update(norm)
        self._scaler.update()
        self._optimizer.zero_grad(set_to_none=True)
        return norm

    def _update(self, norm: torch.Tensor) -> None:
        """Updates the weights, unless the gradient is not finite."""
        optimizer: Any = self._optimizer
        if self._scaler.is_enabled():  # the scaler skips such a step itself
            self._scaler.step(optimizer)
        elif skips_on_device(optimizer, norm) or math.isfinite(norm):
            optimizer.step()

    def save(self, folder: Path) -> None:
        dcp.save(folder / FOLDER, self._state())

    def load(self, folder: Path) -> None:
        state = self._state()
        names = [name for name, p in self._parameters.items() if p.requires_grad]
        state["optimizer"] = dcp.empty_like_saved(
            folder / FOLDER, "optimizer", {n: self._parameters[n] for n in names}
        )
        dcp.load(folder / FOLDER, state)
        number = {
            id(p): i
            for i, p in enumerate(p for g in self._optimizer.param_groups for p in g["params"])
        }
        by_number = {
            number[id(self._parameters[name])]: kept for name, kept in state["optimizer"].items()
        }
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": by_number, "param_groups": groups})
        if "scaler" in state:
            self._scaler.load_state_dict(state["scaler"])

    def _state(self) -> dict[str, Any]:
        """What a checkpoint holds. Weights that are not trained are in the bundle."""
        kept = self._module.state_dict().keys()
        weights = {name: p.detach() for name, p in self._parameters.items() if p.requires_grad}
        buffers = {name: b for name, b in self._module.named_buffers() if name in kept}
        moments = {
            name: dict(self._optimizer.state[p])
            for name, p in self._parameters.items()
            if p.requires_grad
        }
        state: dict[str, Any] = {"model": weights | buffers, "optimizer": moments}
        return (
            {**state, "scaler": self._scaler.state_dict()} if self._scaler.is_enabled() else state
        )

    def export(self, *, frozen: bool = True) -> dict[str, Any]:
        def whole(name: str, _: nn.Parameter) -> torch.Tensor:
            parameter = self._parameters[name]
            return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter

        is_first = torch.distributed.get_rank() == 0
        return gathered(
            self._module, DTYPES[self._plan.precision], whole, is_first=is_first, frozen=frozen
        )
