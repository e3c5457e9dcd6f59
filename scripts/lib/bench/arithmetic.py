"""What the samples say: medians, and medians of ratios within a round. Pure rules.

A machine is never equally fast twice: other work comes and goes, the disk has moods. Candidates of one round ran one
after the other, so what two of them cost is compared within each round, and the median over the rounds is what counts.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from scripts.lib.bench.measure import Sample

Rounds = Sequence[Mapping[str, Sample]]  # for each round: candidate -> what it cost


def median_of(rounds: Rounds, name: str, quantity: Callable[[Sample], float]) -> float:
    """The median over the rounds of what a candidate cost."""
    return statistics.median(quantity(samples[name]) for samples in rounds)


def median_ratio(rounds: Rounds, name: str, base: str) -> float:
    """How many times as long as `base` a candidate took: the median over the rounds of the ratio within each."""
    return statistics.median(samples[name].seconds / samples[base].seconds for samples in rounds)


@dataclass(frozen=True)
class Target:
    """What was to be reached: at least, or (`at_most`) at most, `wanted`."""

    text: str
    reached: float
    wanted: float
    at_most: bool = False

    @property
    def is_met(self) -> bool:
        """As measured, not as rounded for the table."""
        return self.reached <= self.wanted if self.at_most else self.reached >= self.wanted


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: bool = True) -> str:
    """A Markdown table: the first column to the left; the others, where they are numbers, to the right."""
    marks = ["---", *["---:" if numbers else "---" for _ in header[1:]]]
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, marks, *rows)) + "\n"


def cost_table(rounds: Rounds, base: str, size: int) -> str:
    """What each candidate cost; the last column compares with `base`.

    Args:
        size: bytes brought or verified by each candidate.
    """
    rows = []
    for name in rounds[0]:
        seconds = median_of(rounds, name, lambda sample: sample.seconds)
        spread = [sample[name].seconds for sample in rounds]
        rows.append(
            [
                f"**{name}**" if name == base else name,
                f"{seconds:.2f}",
                f"{min(spread):.2f} to {max(spread):.2f}",
                f"{size / seconds / 1e6:.0f}",
                f"{median_of(rounds, name, lambda sample: sample.cpu_s):.2f}",
                f"{median_of(rounds, name, lambda sample: sample.peak) / 2**20:.0f}",
                f"{median_ratio(rounds, name, base):.2f}",
            ]
        )
    header = ["", "seconds", "least to most", "MB/s", "CPU seconds", "peak MiB", f"time / {base}"]
    return table(header, rows)


def target_table(targets: Sequence[Target]) -> str:
    """Targets beside what was reached."""
    rows = []
    for target in targets:
        bound = f"at most {target.wanted:g}" if target.at_most else f"at least {target.wanted:g}"
        rows.append([target.text, bound, f"{target.reached:.2f}", "reached" if target.is_met else "**missed**"])
    return table(["target", "wanted", "measured", ""], rows, numbers=False)
