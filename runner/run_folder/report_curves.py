"""Which charts are drawn: the values of each measure and run, thinned so that peaks stay. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from runner.run_folder.history import History
from runner.run_folder.metric_columns import Columns
from runner.tasks import TASKS

MOST_POINTS = 5000
"""Per line; a screen has fewer columns, and zooming in shows more."""

FEWEST_SMOOTHED = 20
"""Lines with fewer points are drawn as they are."""


@dataclass(frozen=True)
class Line:
    """The values of one run.

    Attributes:
        run: the number of its run, from 0; gives the colour.
        steps: rising.
        values: one per step; None where the value was nan or inf.
    """

    run: int
    steps: tuple[int, ...]
    values: tuple[float | None, ...]

    @property
    def finite(self) -> list[tuple[int, float]]:
        """(step, value) of all values that are numbers."""
        pairs = zip(self.steps, self.values, strict=True)
        return [(step, value) for step, value in pairs if value is not None]


@dataclass(frozen=True)
class Chart:
    """One chart.

    Attributes:
        title: above it.
        unit: of its values.
        lines: those of all runs.
        from_zero: whether the axis includes zero.
        dotted: drawn with its points, for rare measurements.
        window: how many logged steps the moving average covers; 0: there is none.
        log: it begins with a logarithmic axis, because on a linear one most values would be flat.
        folded: another chart says the same, or it says nothing.
    """

    title: str
    unit: str
    lines: tuple[Line, ...]
    from_zero: bool
    dotted: bool
    window: int
    log: bool
    folded: bool

    def to_json(self) -> dict[str, Any]:
        """Returns what the page's script reads."""
        return asdict(self)


MEASURES = (
    # key, title, unit, from zero, smoothed, the measure that makes it redundant
    ("loss", "Training loss", "per predicted token", False, True, ""),
    ("validation_loss", "Validation loss", "", False, False, ""),
    ("validation_accuracy", "Validation accuracy", "", False, False, ""),
    ("lr", "Learning rate", "", True, False, ""),
    ("grad_norm", "Gradient norm, before clipping", "", False, True, ""),
    ("tokens_per_s", "Tokens per second, all ranks", "tokens/s", True, True, ""),
    ("validation_perplexity", "Validation perplexity", "", False, False, "validation_loss"),
    ("samples_per_s", "Samples per second, all ranks", "samples/s", True, True, "tokens_per_s"),
    ("mfu", "Model FLOPs utilization", "of the devices' peak", True, True, "tokens_per_s"),
    ("memory_gib", "Most memory of rank 0 since its last evaluation", "GB", True, False, ""),
    ("data_wait", "Waiting for data", "share of the step", True, True, ""),
)  # fmt: skip

GIB_IN_GB = 2**30 / 1e9
"""Metrics have GiB; people read decimal units everywhere, as on the Hub."""


def charts(runs: Sequence[History]) -> list[Chart]:
    """The charts for which any run has values; the redundant ones last."""
    drawn: dict[str, Chart] = {}
    of_tokens = all(_predicts_tokens(str(run.settings.get("task"))) for run in runs)
    for key, title, unit, from_zero, smoothed, twin in MEASURES:
        seldom = key.startswith("validation_")
        every = (run.validations if seldom else run.steps for run in runs)
        lines = tuple(
            found for index, of_run in enumerate(every) if (found := line_of(index, key, of_run))
        )
        if not lines:
            continue
        longest = max(len(line.steps) for line in lines)
        values = [value for line in lines for _, value in line.finite]
        drawn[key] = Chart(
            title=title,
            unit="" if key == "loss" and not of_tokens else unit,
            lines=lines,
            from_zero=from_zero,
            dotted=seldom,
            window=max(5, longest // 30) if smoothed and longest >= FEWEST_SMOOTHED else 0,
            log=not from_zero and len(values) > 1 and 0 < min(values) <= max(values) / 100,
            folded=twin in drawn or (key in ("memory_gib", "data_wait") and _says_nothing(values)),
        )
    return sorted(drawn.values(), key=lambda chart: chart.folded)


def _predicts_tokens(name: str) -> bool:
    """Whether the loss of a task is a mean over tokens; a later version may know more tasks."""
    task = TASKS.get(name)
    return task is not None and task.has_tokens and not task.has_classes


def line_of(run: int, key: str, lines: Columns) -> Line | None:
    """The line of one measure of a run, thinned; None where no entry has it."""
    scale = GIB_IN_GB if key == "memory_gib" else 1.0
    kept = thinned(lines.points(key))
    if not kept:
        return None
    values = tuple(None if value is None else _rounded(value * scale) for _, value in kept)
    return Line(run, tuple(step for step, _ in kept), values)


def _rounded(value: float) -> float:
    return value if abs(value) > 1e300 else float(f"{value:.6g}")


def _says_nothing(values: Sequence[float]) -> bool:
    """Whether memory or waiting is flat, or near zero."""
    low, high = min(values, default=0.0), max(values, default=0.0)
    return high / 2 - low / 2 <= 0.05 * max(abs(low), abs(high)) or 0 <= low <= high < 0.05


def thinned(
    points: Sequence[tuple[int, float | None]], most: int = MOST_POINTS
) -> list[tuple[int, float | None]]:
    """At most `most` points: the lowest and the highest of each stretch, so each peak stays."""
    if len(points) <= most:
        return list(points)
    kept = []
    stretches = most // 2
    for index in range(stretches):
        part = points[index * len(points) // stretches : (index + 1) * len(points) // stretches]
        finite = [(value, step) for step, value in part if value is not None]
        extremes = {min(finite), max(finite)} if finite else {(None, part[0][0])}
        kept += sorted((step, value) for value, step in extremes)
    return kept
