"""How a model is spread over the ranks."""

from __future__ import annotations

import os
import shutil

import torch
from torch import nn

from runner.config import RunConfig
from runner.errors import UsageError
from runner.plan import Plan
from runner.training.engines.base import Engine

__all__ = ["Engine", "make_engine"]


def make_engine(module: nn.Module, config: RunConfig, plan: Plan, device: torch.device) -> Engine:
    """The engine of a run file's `engine.name` around a module. All ranks call it, after they have joined.

    Args:
        module: float32 on the CPU, the same on every rank.

    Raises:
        UsageError: layers to wrap that the model does not have, an optimizer or a compiler that is not installed.
    """
    if config.compile and not _has_compiler():
        raise UsageError(
            f"{config.path}: compile: true needs a C++ compiler, and this node has none.",
            "Load a module that has one (slurm.modules: [gcc]), or set compile: false.",
        )
    # Only what is asked for is imported: DeepSpeed need not be installed for the others.
    if config.engine.name == "ddp":
        from runner.training.engines.ddp import DDPEngine

        return DDPEngine(module, config, plan, device)
    if config.engine.name == "fsdp":
        from runner.training.engines.fsdp import FSDPEngine

        return FSDPEngine(module, config, plan, device)
    from runner.training.engines.deepspeed import DeepSpeedEngine

    return DeepSpeedEngine(module, config, plan, device)


def _has_compiler() -> bool:
    """Where torch.compile looks for one, for CPUs and for GPUs."""
    named = [os.environ[name] for name in ("CXX", "CC") if os.environ.get(name)]
    return any(shutil.which(name) for name in (*named, "g++", "c++", "clang++"))
