"""Draws one chart as SVG: axes with round numbers, one line per run. Pure.

Colours are CSS classes of the page (`c0` to `c7`), so one chart works in light and dark.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from html import escape

from runner.report.curves import Chart, Curve

WIDTH, HEIGHT = 520, 240
LEFT, RIGHT, TOP, BOTTOM = 70, 24, 14, 40
LIMIT = sys.float_info.max
NUM_COLOURS = 8
DASHES = ("", "6 3", "2 2", "8 3 2 3")
"""From the ninth run on colours repeat, and the dashes differ."""


def svg(
    chart: Chart, span: tuple[int, int] | None = None, *, log: bool = False, described_by: str = ""
) -> str:
    """The chart as an `<svg>` element.

    Args:
        span: the first and the last step of the axis; None: those of the chart.
        log: a logarithmic axis of values.
        described_by: the id of the element that says in words what the chart shows.
    """
    values = [value for curve in chart.curves for _, value in curve.points]
    first, last = span or chart.steps
    low, high = _log_range(values) if log else _range(values, from_zero=chart.from_zero)
    frame = _Frame(first, max(last, first + 1), low, high, log)
    described = f' aria-describedby="{described_by}"' if described_by else ""
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(chart.title)}"'
        f'{described} data-first="{frame.first}" data-last="{frame.last}">',
        *_axes(frame),
        *(part for curve in chart.curves for part in _line(curve, frame)),
        f'<line class="cursor" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>',
        "</svg>",
    ]
    return "".join(parts)


class _Frame:
    """Converts steps and values to coordinates of the chart."""

    def __init__(self, first: int, last: int, low: float, high: float, log: bool) -> None:
        self.first, self.last, self.low, self.high, self.log = first, last, low, high, log

    def x(self, step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * ((step - self.first) / (self.last - self.first))

    def y(self, value: float) -> float:
        low, high = self.low, self.high
        if self.log:
            value, low, high = math.log10(value), math.log10(low), math.log10(high)
        # Halved, because the difference of two doubles may be larger than the largest double.
        share = (value / 2 - low / 2) / (high / 2 - low / 2)
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share


def _log_range(values: list[float]) -> tuple[float, float]:
    room = (max(values) / min(values)) ** 0.05 if max(values) / LIMIT < min(values) else 1.0
    return max(min(values) / room, sys.float_info.min), min(max(values) * room, LIMIT)


def _range(values: list[float], *, from_zero: bool) -> tuple[float, float]:
    if not values:
        return 0.0, 1.0
    low, high = min(values), max(values)
    if from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    largest = max(abs(low), abs(high))
    # Values closer to each other than a double can divide, or than anybody can see.
    if high / 2 - low / 2 <= max(largest * 1e-9, 1e-300):
        room = largest * 0.1 if largest > 1e-290 else 1.0
        return max(low - room, -LIMIT), min(high + room, LIMIT)
    room = (high / 2 - low / 2) * 0.1
    low, high = low if from_zero and low == 0 else low - room, high + room
    return max(low, -LIMIT), min(high, LIMIT)


def _axes(frame: _Frame) -> list[str]:
    bottom = HEIGHT - BOTTOM
    parts = []
    marks = log_ticks(frame.low, frame.high) if frame.log else ticks(frame.low, frame.high, 5)
    for value in marks:
        y = frame.y(value)
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        parts.append(
            f'<text class="tick" x="{LEFT - 6}" y="{y:.1f}" dy=".35em" text-anchor="end">'
            f"{short(value)}</text>"
        )
    for value in ticks(frame.first, frame.last, 5):
        if value == int(value):
            x = frame.x(value)
            parts.append(
                f'<text class="tick" x="{x:.1f}" y="{bottom + 17}" text-anchor="middle">'
                f"{short(value)}</text>"
            )
    parts.append(
        f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{bottom}" y2="{bottom}"/>'
    )
    parts.append(
        f'<text class="tick" x="{WIDTH - RIGHT}" y="{HEIGHT - 4}" text-anchor="end">step</text>'
    )
    return parts


def _line(curve: Curve, frame: _Frame) -> list[str]:
    colour = f"c{curve.run % NUM_COLOURS}"
    dash = DASHES[curve.run // NUM_COLOURS % len(DASHES)]
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    raw = " raw" if curve.smooth else ""
    lines = [("line" + raw, curve.points), ("line", curve.smooth)]
    parts = []
    for kind, points in lines:
        for stretch in _unbroken(points, curve.broken):
            places = " ".join(f"{frame.x(step):.1f},{frame.y(v):.1f}" for step, v in stretch)
            parts.append(f'<polyline class="{kind} {colour}" points="{places}"{dashed}/>')
    # A single point makes no line.
    if curve.dotted or len(curve.points) == 1:
        for step, value in curve.points:
            x, y = frame.x(step), frame.y(value)
            said = f"step {step}: {value:.6g}"
            parts.append(
                f'<circle class="dot {colour}" cx="{x:.1f}" cy="{y:.1f}" r="3">'
                f"<title>{said}</title></circle>"
            )
    for step in curve.broken:
        x, y = frame.x(step), HEIGHT - BOTTOM
        said = f"step {step}: no number (nan or inf)"
        parts.append(
            f'<path class="broken" d="M{x - 4:.1f} {y - 4}l8 8m0 -8l-8 8">'
            f"<title>{said}</title></path>"
        )
    return parts


def _unbroken(
    points: Sequence[tuple[int, float]], broken: Sequence[int]
) -> list[list[tuple[int, float]]]:
    """The parts of the line between steps without a finite value."""
    stretches: list[list[tuple[int, float]]] = [[]]
    breaks = list(broken)
    for point in points:
        while breaks and breaks[0] < point[0]:
            breaks.pop(0)
            if stretches[-1]:
                stretches.append([])
        stretches[-1].append(point)
    return [stretch for stretch in stretches if len(stretch) > 1]


def ticks(low: float, high: float, about: int) -> list[float]:
    """Round numbers between two values, approximately `about` of them."""
    span = high / 2 - low / 2
    if not (span > 0 and math.isfinite(span)):
        return []
    raw = max(span / about * 2, 5e-323)
    power = math.floor(math.log10(raw))
    unit = 10.0**power if power > -300 else raw
    size = next((unit * step for step in (1, 2, 2.5, 5, 10) if unit * step >= raw), unit * 10)
    if not math.isfinite(size):
        return []
    found = []
    for count in range(2 * about + 3):
        value = (math.ceil(low / size) + count) * size
        if value > high:
            break
        found.append(0.0 if abs(value) < size / 1e6 else value)
    return found


def log_ticks(low: float, high: float) -> list[float]:
    """Round numbers for a logarithmic axis: powers of ten, and 2 and 5 times them if few."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    skip = max(1, len(powers) // 6)
    for factors in ((1,), (1, 3), (1, 2, 5)):
        found = [f * 10.0**p for p in powers[::skip] if p > -300 and p < 308 for f in factors]
        found = [value for value in found if low <= value <= high]
        if len(found) >= 3:
            return found
    return ticks(low, high, 5)


def short(value: float) -> str:
    """A number for an axis: `1.2k`, `3e-5`."""
    size = abs(value)
    if 0 < size < 0.001:
        mantissa, _, power = f"{value:.3e}".partition("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(power)}"
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if limit <= size < 1e12:
            return f"{value / limit:.4g}{letter}"
    return f"{value:.4g}"
