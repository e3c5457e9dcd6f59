"""What DDP and FSDP2 have in common: torch's optimizers and loss scaling around parameters that are whole or DTensors.

Master weights, gradients and moments are float32 in every precision; bf16 and fp16 are what is computed in. A
checkpoint is one of torch.distributed.checkpoint, by parameter name: DDP and FSDP2 read each other's, on any number of
ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from runner.config import RunConfig
from runner.plan import Plan
from runner.training.engines import dcp
from runner.training.engines.base import DTYPES, gathered
from runner.training.optimizers import make_optimizer
from runner.training.staging import Stage

FOLDER = "engine"


class NativeEngine:
    """The loop's protocol but for how the module is spread: a subclass makes `wrapped` and says when gradients meet.

    Args:
        module: what has the names and the weights.
        wrapped: what is called.
        fused: whether all weights are on a GPU, where one kernel updates them all.
    """

    notes: tuple[str, ...] = ()

    def __init__(
        self, module: nn.Module, wrapped: nn.Module, config: RunConfig, plan: Plan, device: torch.device, *, fused: bool
    ) -> None:
        self._module, self._wrapped, self._plan, self._device = module, wrapped, plan, device
        self._clip = config.optimizer.clip
        # Taken once: between forward and backward FSDP2 registers the gathered weights under the same names.
        self._parameters = dict(module.named_parameters())
        self._optimizer = make_optimizer(module, config.optimizer, fused=fused)
        self._stage = Stage(device)
        self._scaler = torch.amp.GradScaler(device.type, enabled=plan.precision == "fp16")

    def forward(self, batch: Mapping[str, torch.Tensor], *, last: bool = True) -> torch.Tensor:
        return self._wrapped(**{name: tensor.to(self._device) for name, tensor in batch.items()})  # type: ignore[no-any-return]

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        # Both average over ranks; the loop has scaled for the sum.
        scaled: torch.Tensor = self._scaler.scale(loss * self._plan.world_size)
        scaled.backward()  # type: ignore[no-untyped-call]

    def step(self, rate: float) -> float:
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._scaler.unscale_(self._optimizer)
        trained = [p for p in self._parameters.values() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in trained if p.grad is not None])
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        if self._clip:
            torch.nn.utils.clip_grads_with_norm_(trained, self._clip, norm)
        # With loss scaling the scaler sees to that itself.
        if self._scaler.is_enabled() or math.isfinite(norm):
            self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad(set_to_none=True)
        return float(norm)

    def save(self, folder: Path) -> None:
        dcp.save(folder / FOLDER, self._state())

    def stage(self, folder: Path, group: torch.distributed.ProcessGroup) -> Callable[[], None]:
        copied = self._stage.stage(self._share(self._state()))
        return lambda: dcp.save(folder / FOLDER, copied, group)

    def load(self, folder: Path) -> None:
        state = self._state()
        names = [name for name, p in self._parameters.items() if p.requires_grad]
        state["optimizer"] = dcp.empty_like_saved(folder / FOLDER, "optimizer", {n: self._parameters[n] for n in names})
        dcp.load(folder / FOLDER, state)
        number = {id(p): i for i, p in enumerate(p for g in self._optimizer.param_groups for p in g["params"])}
        self._optimizer.load_state_dict({
            "state": {number[id(self._parameters[name])]: kept for name, kept in state["optimizer"].items()},
            "param_groups": self._optimizer.state_dict()["param_groups"],
        })  # fmt: skip
        if "scaler" in state:
            self._scaler.load_state_dict(state["scaler"])

    def _state(self) -> dict[str, Any]:
        """What a checkpoint holds. Weights that are not trained come from the bundle again."""
        kept = self._module.state_dict().keys()
        weights = {name: p.detach() for name, p in self._parameters.items() if p.requires_grad}
        buffers = {name: b for name, b in self._module.named_buffers() if name in kept}
        moments = {name: dict(self._optimizer.state[p]) for name, p in self._parameters.items() if p.requires_grad}
        state: dict[str, Any] = {"model": weights | buffers, "optimizer": moments}
        return {**state, "scaler": self._scaler.state_dict()} if self._scaler.is_enabled() else state

    def _share(self, state: dict[str, Any]) -> dict[str, Any]:
        """What this rank writes of a state: its shards, and its part of what all hold whole, which DCP writes once.

        Otherwise every rank of a node would copy all of it.
        """
        rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
        load, mine = [0] * ranks, set()
        # The same on every rank: the largest first, to whom has least.
        for name, weight in sorted(state["model"].items(), key=lambda item: (-item[1].numel(), item[0])):
            least = load.index(min(load))
            load[least] += weight.numel()
            if least == rank or isinstance(weight, DTensor):
                mine.add(name)
        kept = {section: {n: v for n, v in state[section].items() if n in mine} for section in ("model", "optimizer")}
        return {**kept, "scaler": state["scaler"]} if "scaler" in state and rank == 0 else kept

    def export(self, *, frozen: bool = True) -> dict[str, Any]:
        def whole(name: str, _: nn.Parameter) -> torch.Tensor:
            parameter = self._parameters[name]
            return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter

        is_first = torch.distributed.get_rank() == 0
        return gathered(self._module, DTYPES[self._plan.precision], whole, is_first=is_first, frozen=frozen)
