"""What a rank shows while it works: heartbeats, and the most memory of each phase."""

from __future__ import annotations

from dataclasses import dataclass, field

from runner.run_folder.heartbeat import Heartbeat
from runner.training.components.memory import PhaseMemory
from runner.training.components.metrics import Observer
from runner.training.components.process_group import Ranks


@dataclass
class Phases:
    """The phases of a rank, one after another: load, train, evaluate.

    Attributes:
        compiles: whether the first use of a phase compiles, and may take as long as a start.
        known: phases that were used before.
        measured: the step at which the last phase ended.
    """

    observer: Observer
    heartbeat: Heartbeat
    memory: PhaseMemory
    ranks: Ranks
    compiles: bool
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
