"""What follows from the number of a step: epoch, learning rate, whether to evaluate. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from runner.config.run_config import RunConfig
from runner.errors import human_count
from runner.training.components.optimization import rate, warmup_steps


@dataclass(frozen=True)
class Schedule:
    """The steps of a run, counted from 0; `step` is how many are done.

    Attributes:
        config: the run file.
        num_steps: optimizer steps of the whole run.
        total: samples per step.
        per_epoch: samples per epoch.
    """

    config: RunConfig
    num_steps: int
    total: int
    per_epoch: int

    def epoch(self, step: int) -> float:
        """How many epochs are done."""
        return step * self.total / self.per_epoch

    def rate(self, step: int) -> float:
        """The learning rate of the next step."""
        schedule, steps = self.config.schedule, self.num_steps
        warmup, decay = (warmup_steps(share, steps) for share in (schedule.warmup, schedule.decay))
        return rate(schedule.name, self.config.optimizer.lr, warmup, steps, step, decay)

    def ends_epoch(self, step: int) -> bool:
        """Whether an epoch ended in the step before."""
        return step * self.total // self.per_epoch > (step - 1) * self.total // self.per_epoch

    def evaluates_after(self, step: int) -> bool:
        """Whether to evaluate now: after every `evaluation.every`, and at the end."""
        every = self.config.evaluation.every
        if step == self.num_steps:
            return True
        return self.ends_epoch(step) if every == "epoch" else step % every == 0

    def describe(self, ranks: str) -> str:
        """The line that opens a training on `ranks`."""
        rounded, epochs = "", self.config.epochs
        if self.config.steps is None and epochs is not None:
            asked = epochs * self.per_epoch / self.total
            if asked < self.num_steps:
                rounded = f" (epochs: {epochs:g} is {asked:.1f} steps, rounded up)"
        steps, size = human_count(self.num_steps, "step"), human_count(self.total, "sequence")
        return f"training {steps} of {size} on {ranks}{rounded}"
