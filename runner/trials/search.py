"""The strategies of a bench, which micro batch to try next, and the results as a table. Pure.

The size doubles until one does not fit. Then the gap is halved until it is an eighth of the size
that fits: each trial costs the start of all ranks, and the last few per cent are worth less.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from runner.errors import UsageError, human_size, suggest
from runner.run_folder.status import format_duration, in_columns

STRATEGIES = {
    "ddp": "{name: ddp}",
    "zero0": "{name: deepspeed, zero: 0}",
    "zero1": "{name: deepspeed, zero: 1}",
    "zero2": "{name: deepspeed, zero: 2}",
    "zero3": "{name: deepspeed, zero: 3}",
    "fsdp-grad-op": "{name: fsdp, sharding: grad_op}",
    "fsdp-full": "{name: fsdp, sharding: full}",
    "zero2-offload": "{name: deepspeed, zero: 2, offload: cpu}",
    "zero3-offload": "{name: deepspeed, zero: 3, offload: cpu}",
    "fsdp-full-offload": "{name: fsdp, sharding: full, offload: cpu}",
}
"""Name -> the value of the run file's `engine:`."""

BY_DEFAULT = tuple(name for name in STRATEGIES if not name.endswith("-offload"))
"""Without offload, which is slow and only for models that do not fit otherwise."""


def chosen(text: str | None) -> tuple[str, ...]:
    """The strategies of `--strategies a,b`; by default those without offload.

    Raises:
        UsageError: a name is not a strategy, or there is none. The message lists all strategies.
    """
    if text is None:
        return BY_DEFAULT
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if unknown := [name for name in names if name not in STRATEGIES]:
        raise UsageError(
            f"--strategies {unknown[0]}: no such strategy.",
            suggest(unknown[0], STRATEGIES, f"There are: {', '.join(STRATEGIES)}."),
        )
    if not names:
        raise UsageError("--strategies names none.", f"There are: {', '.join(STRATEGIES)}.")
    return names


def overrides(strategy: str, micro: int, world_size: int, theirs: Sequence[str]) -> list[str]:
    """The `--set` texts of one trial: the user's, then the strategy with one micro batch per rank.

    Args:
        strategy: its name.
        micro: samples per micro batch.
        world_size: the number of ranks.
        theirs: the user's `--set` texts.
    """
    ours = (
        f"engine={STRATEGIES[strategy]}",
        f"batch.micro={micro}",
        f"batch.global={micro * world_size}",
    )
    return [*theirs, *ours]


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


HEADINGS = (
    "strategy",
    "largest micro batch",
    "per step",
    "tokens/s",
    "samples/s",
    "per epoch",
    "device: load, train, evaluate",
    "host: load, train, evaluate",
    "the search ended at",
)


def result_rows(found: Sequence[SearchResult], num_sequences: int) -> list[tuple[str, ...]]:
    """One row per strategy, under `HEADINGS`.

    Args:
        found: the results.
        num_sequences: sequences per epoch.
    """
    return [_row(one, num_sequences) for one in found]


def _row(one: SearchResult, num_sequences: int) -> tuple[str, ...]:
    best = one.best
    if best is None:
        return (one.strategy, "none" if one.trials else "", *([""] * 6), one.end)
    note = f"{best.note}; " if best.note else ""
    fastest = one.fastest
    if (
        fastest is not None
        and fastest.micro != best.micro
        and fastest.samples_per_s > 1.05 * best.samples_per_s
    ):
        note += f"micro {fastest.micro} is faster: {fastest.samples_per_s:.3g} samples/s; "
    return (
        one.strategy,
        f"{best.micro} x {best.world_size}",
        f"{best.step_s:.3g} s",
        f"{best.tokens_per_s:,.0f}" + (f" (MFU {best.mfu:.0%})" if best.mfu is not None else ""),
        f"{best.samples_per_s:.3g}",
        format_duration(num_sequences / best.samples_per_s),
        _memory(best, "device"),
        _memory(best, "host"),
        (note + (one.end or "the largest that --largest allows")),
    )


def _memory(trial: Trial, where: str) -> str:
    """The most memory of a rank in each phase; a CPU is no device of its own."""
    known = [phase[where] for phase in trial.memory.values() if where in phase]
    return ", ".join(human_size(gib * 2**30) for gib in known) or "-"


def as_text(table: Sequence[Sequence[str]]) -> str:
    """The table in columns, for a terminal."""
    return "\n".join(in_columns([HEADINGS, *table]))


def as_markdown(title: str, table: Sequence[Sequence[str]]) -> str:
    """The table in Markdown, for a README or a report."""
    lines = [HEADINGS, ["---"] * len(HEADINGS), *table]
    body = "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)
    return f"# {title}\n\n{body}\n"
