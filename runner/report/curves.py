"""Which curves are drawn: the points of each measure and run, thinned so that peaks stay. Pure."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from runner.run_folder.history import History, number

MOST_POINTS = 600
"""Per curve: this keeps the page small, and a screen has no more columns."""

LARGEST = sys.float_info.max

FEWEST_SMOOTHED = 20
"""Curves with fewer points are drawn as they are."""


@dataclass(frozen=True)
class Curve:
    """One line.

    Attributes:
        run: the number of its run, from 0; gives the colour.
        points: (step, value), rising in step.
        broken: steps at which the value was nan or inf.
        dotted: drawn with its points, for rare measurements.
        smooth: the moving average, drawn over the points; empty: none.
    """

    run: int
    points: tuple[tuple[int, float], ...]
    broken: tuple[int, ...] = ()
    dotted: bool = False
    smooth: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Chart:
    """One chart.

    Attributes:
        title: above it.
        unit: of its values.
        curves: those of all runs.
        from_zero: whether the axis includes zero.
        window: how many logged steps the moving average covers; 0: there is none.
        folded: another chart says the same, or it says nothing.
    """

    title: str
    unit: str
    curves: tuple[Curve, ...]
    from_zero: bool = False
    window: int = 0
    folded: bool = False

    @property
    def steps(self) -> tuple[int, int]:
        """The first and the last step of all curves."""
        steps = [s for c in self.curves for s in (*(step for step, _ in c.points), *c.broken)]
        return min(steps), max(steps)

    @property
    def has_log_axis(self) -> bool:
        """Whether a logarithmic axis can show the values, and shows more of them."""
        values = [value for curve in self.curves for _, value in curve.points]
        return len(values) > 1 and min(values) > 0 and max(values) / 2 >= min(values)

    @property
    def begins_with_log_axis(self) -> bool:
        """Whether most values would be flat on a linear axis."""
        if self.from_zero or not self.has_log_axis:
            return False
        values = [value for curve in self.curves for _, value in curve.points]
        return max(values) / 100 >= min(values)


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

_PREDICT_TOKENS = ("masked-lm", "causal-lm", "instruction")
"""The tasks whose loss is a mean over predicted tokens."""

GIB_IN_GB = 2**30 / 1e9
"""Metrics have GiB; people read decimal units everywhere, as on the Hub."""


def charts(runs: Sequence[History]) -> list[Chart]:
    """The charts for which any run has values; the redundant ones last."""
    drawn: dict[str, Chart] = {}
    of_tokens = all(run.settings.get("task") in _PREDICT_TOKENS for run in runs)
    for key, title, unit, from_zero, smoothed, twin in MEASURES:
        seldom = key.startswith("validation_")
        curves = [
            curve
            for index, run in enumerate(runs)
            if (
                curve := curve_of(
                    index, key, run.validations if seldom else run.steps, dotted=seldom
                )
            )
            is not None
        ]
        if curves:
            chart = _smoothed(curves) if smoothed else Chart("", "", tuple(curves))
            folded = twin in drawn or (key in ("memory_gib", "data_wait") and _says_nothing(chart))
            unit = "" if key == "loss" and not of_tokens else unit
            drawn[key] = replace(chart, title=title, unit=unit, from_zero=from_zero, folded=folded)
    thin = [
        replace(chart, curves=tuple(_thin(curve) for curve in chart.curves))
        for chart in drawn.values()
    ]
    return sorted(thin, key=lambda chart: chart.folded)


def curve_of(
    run: int, key: str, lines: Iterable[Mapping[str, Any]], *, dotted: bool = False
) -> Curve | None:
    """The curve of one measure of a run, with all points; None where no line has it."""
    points, broken = [], []
    for line in lines:
        if (value := number(line, key)) is not None:
            points.append((int(line["step"]), value * GIB_IN_GB if key == "memory_gib" else value))
        elif key in line:
            broken.append(int(line["step"]))
    if not points and not broken:
        return None
    return Curve(run, tuple(points), tuple(broken[:MOST_POINTS]), dotted)


def _smoothed(curves: Sequence[Curve]) -> Chart:
    """The chart of these curves, each with its moving average over the same number of steps."""
    longest = max(len(curve.points) for curve in curves)
    if longest < FEWEST_SMOOTHED:
        return Chart("", "", tuple(curves))
    window = max(5, longest // 30)
    smoothed = tuple(replace(c, smooth=moving_average(c.points, window)) for c in curves)
    return Chart("", "", smoothed, window=window)


def moving_average(
    points: Sequence[tuple[int, float]], window: int
) -> tuple[tuple[int, float], ...]:
    """The moving average of the steps around each step, so it does not lag behind the values."""
    low = min((value for _, value in points), default=0.0)
    high = max((value for _, value in points), default=0.0)
    values = [value for _, value in points]
    before, after = _averages(values, window), _averages(values[::-1], window)[::-1]
    return tuple(
        (step, min(max(one / 2 + other / 2, low), high))
        for (step, _), one, other in zip(points, before, after, strict=True)
    )


def _averages(values: Sequence[float], window: int) -> list[float]:
    """The exponential moving average of the values so far, not drawn towards zero at first."""
    share = 2 / (window + 1)
    total = weight = 0.0
    found = []
    for value in values:
        total = total * (1 - share) + value * share
        weight = weight * (1 - share) + share
        found.append(min(max(total / weight, -LARGEST), LARGEST))
    return found


def _says_nothing(chart: Chart) -> bool:
    """Whether a chart of memory or waiting is flat, or near zero."""
    values = [value for curve in chart.curves for _, value in curve.points]
    if not values:
        return True
    low, high = min(values), max(values)
    return high / 2 - low / 2 <= 0.05 * max(abs(low), abs(high)) or 0 <= low <= high < 0.05


def _thin(curve: Curve) -> Curve:
    return replace(
        curve,
        points=tuple(thinned(curve.points)),
        smooth=tuple(thinned(curve.smooth, MOST_POINTS // 2)),
    )


def thinned(
    points: Sequence[tuple[int, float]], most: int = MOST_POINTS
) -> list[tuple[int, float]]:
    """At most `most` points: the lowest and the highest of each stretch, so each peak stays."""
    if len(points) <= most:
        return list(points)
    kept = []
    stretches = most // 2
    for index in range(stretches):
        part = points[index * len(points) // stretches : (index + 1) * len(points) // stretches]
        extremes = {min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])}
        kept += sorted(extremes)
    return kept
