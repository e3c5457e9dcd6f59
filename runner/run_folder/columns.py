"""Many lines of measures, as columns of numbers: a tenth of the memory of dicts."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, overload

MISSING, NO_NUMBER = math.nan, math.inf


class Columns(Sequence[Mapping[str, Any]]):
    """Lines of a `metrics.jsonl`; a value that is no finite number is None."""

    def __init__(self) -> None:
        self._steps = array("q")
        self._columns: dict[str, array[float]] = {}

    def append(self, line: Mapping[str, Any]) -> None:
        """Adds a line, which has a `step`."""
        count = len(self._steps)
        for key, value in line.items():
            if key == "step":
                continue
            if (column := self._columns.get(key)) is None:
                column = self._columns[key] = array("d")
            if len(column) < count:
                column.extend([MISSING] * (count - len(column)))
            if type(value) is not float:
                value = _as_float(value)
            column.append(value if -NO_NUMBER < value < NO_NUMBER else NO_NUMBER)
        self._steps.append(line["step"])

    def by_step(self) -> Columns:
        """The last line of each step, in order of the steps."""
        steps = self._steps
        if all(steps[index] < steps[index + 1] for index in range(len(steps) - 1)):
            return self
        last = {step: index for index, step in enumerate(steps)}
        ordered = Columns()
        for step in sorted(last):
            ordered.append(self[last[step]])
        return ordered

    def points(self, key: str) -> list[tuple[int, float | None]]:
        """(step, value) of the lines that have a measure."""
        column = self._columns.get(key, ())
        return [
            (step, None if value == NO_NUMBER else value)
            for step, value in zip(self._steps, column, strict=False)
            if value == value  # not MISSING
        ]

    def __len__(self) -> int:
        """Returns the number of lines."""
        return len(self._steps)

    @overload
    def __getitem__(self, index: int) -> Mapping[str, Any]: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Mapping[str, Any]]: ...

    def __getitem__(self, index: int | slice) -> Any:
        """Returns a line, or several."""
        if isinstance(index, slice):
            return [self[one] for one in range(len(self))[index]]
        index = range(len(self))[index]
        line: dict[str, Any] = {"step": self._steps[index]}
        for key, column in self._columns.items():
            if index < len(column) and column[index] == column[index]:
                line[key] = None if column[index] == NO_NUMBER else column[index]
        return line


def _as_float(value: Any) -> float:
    try:
        return float(value) if isinstance(value, int) and not isinstance(value, bool) else NO_NUMBER
    except OverflowError:
        return NO_NUMBER
