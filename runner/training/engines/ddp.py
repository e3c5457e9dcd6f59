"""DistributedDataParallel: every rank holds everything; gradients are averaged once per step."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from runner.config.run_config import RunConfig
from runner.plan.plan import TrainingPlan
from runner.training.components.device import DTYPES
from runner.training.engines.compiling import compile_model
from runner.training.engines.native import NativeEngine
from runner.training.weights import Weights


class DDPEngine(NativeEngine):
    """`DistributedDataParallel` behind the loop's protocol; low precision by autocast."""

    def __init__(
        self, module: nn.Module, config: RunConfig, plan: TrainingPlan, device: torch.device
    ) -> None:
        if config.quantization is None:
            Weights(module, device).fill(module.parameters())
        else:  # each rank has quantised its own
            module.to(device)
        if config.compile:
            self.notes = (compile_model(module),)
        on_gpu = device.type == "cuda"
        wrapped = DistributedDataParallel(
            module,
            device_ids=[device.index] if on_gpu else None,
            gradient_as_bucket_view=True,
            broadcast_buffers=False,  # RunningStatistics averages them, for every engine
        )
        super().__init__(module, wrapped, config, plan, device)

    def forward(self, batch: Mapping[str, torch.Tensor], *, last: bool = True) -> torch.Tensor:
        wrapped: DistributedDataParallel = self._wrapped  # type: ignore[assignment]
        low = self._plan.precision != "fp32"
        # DDP decides here, not in backward, whether the backward exchanges gradients.
        with (
            nullcontext() if last else wrapped.no_sync(),
            torch.autocast(
                self._device.type, DTYPES[self._plan.precision] if low else None, enabled=low
            ),
        ):
            return super().forward(batch)
