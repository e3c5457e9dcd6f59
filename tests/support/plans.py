"""What is decided for a run file, where a test has its parts alone."""

from __future__ import annotations

from runner.config.run_config import RunConfig
from runner.job import plan
from runner.job.plan import TrainingPlan
from runner.job.shapes import Device, ModelShape


def decide(config: RunConfig, shape: ModelShape, device: Device, world_size: int) -> TrainingPlan:
    """The plan, with the length of its sequences."""
    length = plan.sequence_length(config, shape)
    return plan.decide(config, shape, length, device, world_size)
