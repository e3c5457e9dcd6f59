"""Which curves are drawn: the points of each measure and run, thinned so that peaks stay. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runner.run_folder.history import History, number

MOST_POINTS = 600
"""Per curve: this keeps the page small, and a screen has no more columns."""


@dataclass(frozen=True)
class Curve:
    """One line.

    Attributes:
        run: the number of its run, from 0; gives the colour.
        points: (step, value), rising in step.
        broken: steps at which the value was nan or inf.
        dotted: drawn with its points, for rare measurements.
    """

    run: int
    points: tuple[tuple[int, float], ...]
    broken: tuple[int, ...] = ()
    dotted: bool = False


@dataclass(frozen=True)
class Chart:
    """One chart.

    Attributes:
        title: above it.
        unit: of its values.
        curves: those of all runs.
        from_zero: whether the axis includes zero.
    """

    title: str
    unit: str
    curves: tuple[Curve, ...]
    from_zero: bool = False


MEASURES = (
    # key, title, unit, from zero
    ("loss", "Training loss", "per predicted token", False),
    ("validation_loss", "Validation loss", "", False),
    ("validation_perplexity", "Validation perplexity", "", False),
    ("validation_accuracy", "Validation accuracy", "", False),
    ("lr", "Learning rate", "", True),
    ("grad_norm", "Gradient norm, before clipping", "", True),
    ("tokens_per_s", "Tokens per second, all ranks", "tokens/s", True),
    ("samples_per_s", "Samples per second, all ranks", "samples/s", True),
    ("mfu", "Model FLOPs utilization", "of the devices' peak", True),
    ("memory_gib", "Most memory of rank 0 so far", "GiB", True),
    ("data_wait", "Waiting for data", "share of the step", True),
)


def charts(runs: Sequence[History]) -> list[Chart]:
    """The charts for which any run has values."""
    drawn = []
    for key, title, unit, from_zero in MEASURES:
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
            drawn.append(Chart(title, unit, tuple(curves), from_zero))
    return drawn


def curve_of(
    run: int, key: str, lines: Iterable[Mapping[str, Any]], *, dotted: bool = False
) -> Curve | None:
    """The curve of one measure of a run; None where no line has it."""
    points, broken = [], []
    for line in lines:
        if (value := number(line, key)) is not None:
            points.append((int(line["step"]), value))
        elif key in line:
            broken.append(int(line["step"]))
    if not points and not broken:
        return None
    return Curve(run, tuple(thinned(points)), tuple(broken[:MOST_POINTS]), dotted)


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
