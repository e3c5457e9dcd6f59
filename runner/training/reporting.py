"""What a rank shows while it works: heartbeats, a trial of memory, the most of each phase."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass, field

import torch

from runner.job.host_memory import data_limit
from runner.run_folder.heartbeat import Heartbeat
from runner.training.components.memory import PhaseMemory
from runner.training.components.metrics import Observer
from runner.training.components.process_group import Ranks

STEPS = 2
"""Two, because Adam makes its moments at the end of the first."""


class FirstSteps:
    """The first steps of a start, which try whether an automatic `batch.micro` fits.

    Shows in the heartbeat that the steps are a trial, and on a CPU limits this rank's memory.

    With the limit, too much is an error that says so: the kernel kills no rank. It is lifted after
    these steps, because rank 0 may hold more than its share later, while it exports.
    """

    def __init__(self, heartbeat: Heartbeat) -> None:
        self._heartbeat, self._left = heartbeat, 0
        self._limits: tuple[int, int] | None = None

    def begin(self, device: torch.device) -> None:
        """Begins the trial, after everything is loaded."""
        self._left = STEPS
        self._heartbeat.tries = True
        if device.type == "cpu":
            self._limits = resource.getrlimit(resource.RLIMIT_DATA)
            most = data_limit(int(os.environ["LOCAL_WORLD_SIZE"]), os.environ)
            resource.setrlimit(resource.RLIMIT_DATA, (most, self._limits[1]))

    @property
    def are_tried(self) -> bool:
        """Whether the trial is not over."""
        return self._left > 0

    def count(self) -> None:
        """Counts a step."""
        self._left -= self._left > 0
        if not self._left:
            self._heartbeat.tries = False
            self.lift()

    def lift(self) -> None:
        """Lifts the limit: an error must be reported, too."""
        if self._limits is not None:
            resource.setrlimit(resource.RLIMIT_DATA, self._limits)
            self._limits = None


@dataclass
class Phases:
    """The phases of a rank, one after another: load, train, evaluate.

    Attributes:
        compiles: whether the first use of a phase compiles, and may take as long as a start.
        first_steps: whether they are a trial of `batch.micro`.
        known: phases that were used before.
        measured: the step at which the last phase ended.
    """

    observer: Observer
    heartbeat: Heartbeat
    memory: PhaseMemory
    ranks: Ranks
    compiles: bool
    first_steps: FirstSteps
    known: set[str] = field(default_factory=set)
    measured: int = 0

    def beat(self, phase: str) -> None:
        """Writes a heartbeat."""
        is_slow = self.compiles and phase not in self.known
        self.heartbeat.beat("start" if is_slow else phase)

    def end(self, phase: str, step: int, epoch: float) -> None:
        """Logs the most memory of any rank in the phase that ends here. All ranks call it.

        Checkpoints count to the phase that follows them, so mostly to `train`.
        """
        mine = self.memory.end()
        each = self.ranks.gather(mine)
        most = {f"{phase}_{where}_gib": max(one[where] for one in each) for where in mine}
        self.observer.write({"step": step, "epoch": epoch, **most})
        self.measured = step
