"""The results of a bench as text, Markdown and SVG. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

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


WIDTH, ROW, LEFT, RIGHT, TOP = 720, 34, 150, 220, 56


def svg(title: str, found: Sequence[SearchResult]) -> str:
    """One bar per strategy: samples per second at its largest micro batch.

    Light and dark follow the reader's setting.
    """
    best = [(one.strategy, one.best) for one in found]
    most = max((trial.samples_per_s for _, trial in best if trial is not None), default=1.0)
    height = TOP + ROW * len(best) + 12
    bars = "".join(_bar(index, name, trial, most) for index, (name, trial) in enumerate(best))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" role="img">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style>"
        f'<rect class="paper" width="{WIDTH}" height="{height}"/>'
        f'<text class="title" x="12" y="24">{escape(title)}</text>'
        '<text class="dim" x="12" y="43">'
        f"samples per second at the largest micro batch that fits</text>{bars}</svg>\n"
    )


_STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#1d2126}"
    ".title{font-weight:600;font-size:15px}.dim{fill:#5d6672}"
    ".paper{fill:#fdfdfc}.bar{fill:#1f6feb}"
    "@media(prefers-color-scheme:dark){text{fill:#e4e7eb}.dim{fill:#9aa4b0}"
    ".paper{fill:#15181c}.bar{fill:#6ea8fe}}"
)


def _bar(index: int, name: str, trial: Trial | None, most: float) -> str:
    y = TOP + ROW * index
    label = f'<text x="{LEFT - 8}" y="{y + 19}" text-anchor="end">{escape(name)}</text>'
    if trial is None:
        return f'{label}<text class="dim" x="{LEFT}" y="{y + 19}">does not run here</text>'
    width = max(2.0, (WIDTH - LEFT - RIGHT) * trial.samples_per_s / most)
    said = (
        f"{trial.samples_per_s:.3g}/s, micro {trial.micro}, {human_size(trial.memory_gib * 2**30)}"
    )
    return (
        f'{label}<rect class="bar" x="{LEFT}" y="{y + 4}" width="{width:.1f}" '
        f'height="{ROW - 12}" rx="3"/>'
        f'<text class="dim" x="{LEFT + width + 8:.1f}" y="{y + 19}">{said}</text>'
    )
