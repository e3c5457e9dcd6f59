"""Medians of samples, and medians of ratios within a round. Pure.

The speed of a machine varies: with other work, and with the state of the disk. Candidates of a
round run one after the other, so two of them are compared within each round, and the result is the
median over the rounds.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from scripts.lib.bench.measure import Sample

Rounds = Sequence[Mapping[str, Sample]]  # for each round: candidate -> what it cost


def median_of(rounds: Rounds, name: str, quantity: Callable[[Sample], float]) -> float:
    """The median over the rounds of a quantity of a candidate."""
    return statistics.median(quantity(samples[name]) for samples in rounds)


def median_ratio(rounds: Rounds, name: str, base: str) -> float:
    """Seconds of a candidate divided by those of `base`: the median of the ratios of all rounds."""
    return statistics.median(samples[name].seconds / samples[base].seconds for samples in rounds)


@dataclass(frozen=True)
class Target:
    """A target: at least `wanted`, or at most (`at_most`)."""

    text: str
    reached: float
    wanted: float
    at_most: bool = False

    @property
    def is_met(self) -> bool:
        """Whether the measured number meets it, not the rounded one of the table."""
        return self.reached <= self.wanted if self.at_most else self.reached >= self.wanted


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: bool = True) -> str:
    """A Markdown table: the first column to the left, columns of numbers to the right."""
    marks = ["---", *["---:" if numbers else "---" for _ in header[1:]]]
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, marks, *rows)) + "\n"


def cost_table(rounds: Rounds, base: str, size: int, unit: str = "MB/s", per: float = 1e6) -> str:
    """The table of costs; the last column compares with `base`.

    Args:
        size: what each candidate handles, in bytes, tokens or steps.
        unit, per: the heading of the column of `size` per second, and what it is divided by.
    """
    rows = []
    for name in rounds[0]:
        seconds = median_of(rounds, name, lambda sample: sample.seconds)
        spread = [sample[name].seconds for sample in rounds]
        rows.append(
            [
                f"**{name}**" if name == base else name,
                _seconds(seconds),
                f"{_seconds(min(spread))} to {_seconds(max(spread))}",
                f"{size / seconds / per:,.0f}",
                f"{median_of(rounds, name, lambda sample: sample.cpu_s):.2f}",
                f"{median_of(rounds, name, lambda sample: sample.peak) / 2**20:.0f}",
                f"{median_ratio(rounds, name, base):.2f}",
            ]
        )
    header = ["", "seconds", "least to most", unit, "CPU seconds", "peak MiB", f"time / {base}"]
    return table(header, rows)


def _seconds(value: float) -> str:
    return f"{value:.2f}" if value >= 1 else f"{value:.3g}"


def target_table(targets: Sequence[Target]) -> str:
    """Targets beside what was reached."""
    rows = []
    for target in targets:
        bound = f"at most {target.wanted:g}" if target.at_most else f"at least {target.wanted:g}"
        rows.append(
            [
                target.text,
                bound,
                f"{target.reached:.2f}",
                "reached" if target.is_met else "**missed**",
            ]
        )
    return table(["target", "wanted", "measured", ""], rows, numbers=False)
