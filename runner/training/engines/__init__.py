"""Engines: each spreads a model over the ranks in one way."""

from __future__ import annotations

import torch
from torch import nn

from runner.config.run_config import RunConfig
from runner.job.installed import check_fsdp
from runner.job.plan import TrainingPlan
from runner.training.engines.base import Engine
from runner.training.weights import check_batch_norm

__all__ = ["Engine", "make_engine"]


def make_engine(
    module: nn.Module, config: RunConfig, plan: TrainingPlan, device: torch.device
) -> Engine:
    """The engine for a run file's `engine.name`. All ranks call it, after they have joined.

    Args:
        module: float32 on the CPU, the same on every rank.
        config: the run file.
        plan: precision, batch sizes and ZeRO stage of the run.
        device: of this rank.

    Raises:
        UsageError: the model does not have the layers to wrap, or has batch norm that would be in
            16 bits; this torch has FSDP2 for GPUs only.
    """
    check_batch_norm(module, config, plan.precision)
    # Imported only where it is used: DDP and FSDP do not need DeepSpeed.
    if config.engine.name == "ddp":
        from runner.training.engines.native import DDPEngine

        return DDPEngine(module, config, plan, device)
    if config.engine.name == "fsdp":
        check_fsdp(config, device.type)
        from runner.training.engines.native import FSDPEngine

        return FSDPEngine(module, config, plan, device)
    from runner.training.engines.deepspeed import DeepSpeedEngine

    return DeepSpeedEngine(module, config, plan, device)
