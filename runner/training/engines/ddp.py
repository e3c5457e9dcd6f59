"""DistributedDataParallel: every rank holds everything; gradients are averaged once per step."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from runner.config.run_config import RunConfig
from runner.errors import UsageError, human_count
from runner.job.plan import TrainingPlan
from runner.training.components.device import DTYPES
from runner.training.engines.compiling import compile_model
from runner.training.engines.native import NativeEngine
from runner.training.weights import Weights

NAMED = 3  # at most so many weights are named in a message


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
        self._place, self._is_checked = config.path, False

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

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        super().backward(loss, last=last)
        if last and not self._is_checked:
            self._is_checked = True
            self._check_gradients()

    def _check_gradients(self) -> None:
        """Refuses weights without a gradient, at the first step.

        DDP waits for each gradient: the next forward would end with "Expected to have finished
        reduction in the prior iteration".

        Raises:
            UsageError: some have none; names them.
        """
        parameters = self._parameters.items()
        unused = [name for name, p in parameters if p.requires_grad and p.grad is None]
        if unused:
            raise UsageError(
                f"{self._place}: engine.name: ddp: {human_count(len(unused), 'weight')} of the "
                "model take no part in the loss, and DDP waits for the gradient of each: "
                f"{', '.join(unused[:NAMED])}{', ...' if len(unused) > NAMED else ''}.",
                "Set engine: {name: fsdp} or {name: deepspeed}.",
            )
