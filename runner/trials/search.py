"""Which micro batch to try next. Pure.

The size doubles until one does not fit. Then the gap is halved until it is an eighth of the size
that fits: each trial costs the start of all ranks, and the last few per cent are worth less.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

Outcome = Literal["fits", "out of memory", "too slow", "failed"]


@dataclass(frozen=True)
class Trial:
    """One try.

    Attributes:
        strategy: its name.
        micro: samples per micro batch.
        outcome: how it ended.
        words: why it did not fit, as text for people.
        world_size: the number of ranks.
        tokens_per_s, samples_per_s, step_s: medians over the measured steps, of all ranks together.
        memory_gib: the most of any rank, of its device.
        memory: phase -> `device` and `host` -> the most of any rank, GiB.
        mfu: model FLOPs utilization, 0 to 1; None where unknown.
        note: text for the table.
    """

    strategy: str
    micro: int
    outcome: Outcome
    words: str = ""
    world_size: int = 0
    tokens_per_s: float = 0.0
    samples_per_s: float = 0.0
    step_s: float = 0.0
    memory_gib: float = 0.0
    memory: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    mfu: float | None = None
    note: str = ""


@dataclass
class SearchResult:
    """The result of one strategy.

    Attributes:
        strategy: its name.
        trials: every trial, in the order of trying.
        refused: why it was not tried; empty if it was.
    """

    strategy: str
    trials: list[Trial] = field(default_factory=list)
    refused: str = ""

    @property
    def best(self) -> Trial | None:
        """The trial with the largest micro batch that fits."""
        return max(
            (t for t in self.trials if t.outcome == "fits"), key=lambda t: t.micro, default=None
        )

    @property
    def fastest(self) -> Trial | None:
        """The trial with the most samples per second. It is not always the largest."""
        return max(
            (t for t in self.trials if t.outcome == "fits"),
            key=lambda t: t.samples_per_s,
            default=None,
        )

    @property
    def end(self) -> str:
        """Why the search ended."""
        stopped = [t for t in self.trials if t.outcome != "fits"]
        if self.refused:
            return self.refused
        return (
            f"micro {stopped[-1].micro}: {stopped[-1].words or stopped[-1].outcome}"
            if stopped
            else ""
        )


def search(strategy: str, most: int, try_one: Callable[[int], Trial]) -> SearchResult:
    """Tries micro batches of one strategy.

    Args:
        strategy: its name.
        most: the largest micro batch to try.
        try_one: makes one trial.
    """
    found = SearchResult(strategy)
    fits, too_large, micro = 0, most + 1, 1
    while fits < micro < too_large:
        trial = try_one(micro)
        found.trials.append(trial)
        if trial.outcome == "failed":  # a larger one would fail too
            break
        if trial.outcome == "fits":
            fits = micro
        else:
            too_large = micro
        micro = next_micro(fits, too_large, most)
    return found


def next_micro(fits: int, too_large: int, most: int) -> int:
    """The next size to try; `fits` where it is known well enough."""
    if too_large > most:
        return min(max(1, fits * 2), most)
    gap = too_large - fits
    return fits if gap <= max(1, fits // 8) else fits + gap // 2
