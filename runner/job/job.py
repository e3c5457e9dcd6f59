"""The name of `TrainingRun` in modules that still use it."""

from runner.job.training_run import TrainingRun as Job

__all__ = ["Job"]
