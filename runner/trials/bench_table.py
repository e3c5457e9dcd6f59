"""The results of a bench as text and Markdown. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from runner.errors import human_size
from runner.run_folder.status import format_duration
from runner.trials.search import SearchResult, Trial

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


def rows(found: Sequence[SearchResult], num_sequences: int) -> list[tuple[str, ...]]:
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


def text(table: Sequence[Sequence[str]]) -> str:
    """The table in columns, for a terminal."""
    lines = [HEADINGS, *table]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADINGS))]
    padded = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
    return "\n".join(padded)


def markdown(title: str, table: Sequence[Sequence[str]]) -> str:
    """The table in Markdown, for a README or a report."""
    lines = [HEADINGS, ["---"] * len(HEADINGS), *table]
    body = "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)
    return f"# {title}\n\n{body}\n"
