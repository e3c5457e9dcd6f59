"""Lines of a `metrics.jsonl` as columns of numbers: a tenth of the memory of dicts."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

MISSING, NO_NUMBER = math.nan, math.inf


class Columns:
    """Measures, each a column with one entry per line.

    Attributes:
        steps: of the lines.
        last: the line of the highest step, as it was written; empty: there is none.
    """

    def __init__(self) -> None:
        self.steps = array("q")
        self.last: Mapping[str, Any] = {}
        self._columns: dict[str, array[float]] = {}

    def append(self, line: Mapping[str, Any]) -> None:
        """Adds a line, which has a `step`."""
        for key, value in line.items():
            if (column := self._columns.get(key)) is None:
                column = self._columns[key] = array("d")
            if len(column) < len(self.steps):
                column.extend([MISSING] * (len(self.steps) - len(column)))
            if type(value) is not float or not -NO_NUMBER < value < NO_NUMBER:
                value = _as_float(value)
            column.append(value)
        self.steps.append(line["step"])
        if line["step"] >= self.last.get("step", line["step"]):
            self.last = line

    def by_step(self) -> Columns:
        """The last line of each step, in order of the steps."""
        if all(one < next_one for one, next_one in pairwise(self.steps)):
            return self
        last = {step: index for index, step in enumerate(self.steps)}
        order = [last[step] for step in sorted(last)]
        ordered = Columns()
        ordered.steps, ordered.last = array("q", (self.steps[i] for i in order)), self.last
        for key, column in self._columns.items():
            column.extend([MISSING] * (len(self.steps) - len(column)))
            ordered._columns[key] = array("d", (column[i] for i in order))
        return ordered

    def points(self, key: str) -> list[tuple[int, float | None]]:
        """(step, value) of the lines that have a measure; None where it was no finite number."""
        return [
            (step, None if value == NO_NUMBER else value)
            for step, value in zip(self.steps, self._columns.get(key, ()), strict=False)
            if value == value  # not MISSING
        ]

    def numbers(self, key: str) -> list[float]:
        """The finite numbers of one measure, in order."""
        return [value for _, value in self.points(key) if value is not None]


def _as_float(value: Any) -> float:
    found = number({"value": value}, "value")
    return NO_NUMBER if found is None else found


def number(line: Mapping[str, Any], key: str) -> float | None:
    """A finite number of a metrics line; None if there is none (null stands for nan and inf)."""
    value = line.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None
