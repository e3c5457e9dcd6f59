"""DistributedDataParallel: every rank holds everything, gradients meet once a step."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from runner.config import RunConfig
from runner.plan import Plan
from runner.training.engines.base import DTYPES
from runner.training.engines.native import NativeEngine


class DDPEngine(NativeEngine):
    """`DistributedDataParallel` behind the loop's protocol; low precision by autocast."""

    def __init__(self, module: nn.Module, config: RunConfig, plan: Plan, device: torch.device) -> None:
        module.to(device)
        if config.compile:
            module.compile()
        on_gpu = device.type == "cuda"
        wrapped = DistributedDataParallel(
            module,
            device_ids=[device.index] if on_gpu else None,
            gradient_as_bucket_view=True,
            broadcast_buffers=False,  # the loop averages them, for every engine
        )
        super().__init__(module, wrapped, config, plan, device, fused=on_gpu)

    def forward(self, batch: Mapping[str, torch.Tensor], *, last: bool = True) -> torch.Tensor:
        wrapped: DistributedDataParallel = self._wrapped  # type: ignore[assignment]
        low = self._plan.precision != "fp32"
        # Whether the backward to come exchanges gradients is decided here, not when it runs.
        with (
            nullcontext() if last else wrapped.no_sync(),
            torch.autocast(self._device.type, DTYPES[self._plan.precision] if low else None, enabled=low),
        ):
            return super().forward(batch)
