"""What a column of a dataset must hold, by its Arrow type. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from runner.errors import Lines, Place


def is_text(kind: str) -> bool:
    """Returns whether an Arrow type is a text."""
    return kind in ("string", "large_string", "string_view")


def is_integer(kind: str) -> bool:
    """Returns whether an Arrow type is a whole number of any width."""
    return kind.removeprefix("u") in ("int8", "int16", "int32", "int64")


def is_class(kind: str) -> bool:
    """Returns whether values of an Arrow type can be classes."""
    return is_integer(kind) or is_text(kind)


def in_lists(fits: Callable[[str], bool]) -> Callable[[str], bool]:
    """Returns whether an Arrow type is a list of what fits."""

    def fit(kind: str) -> bool:
        inner = re.fullmatch(r"(?:large_)?list<\w+: (\w+)(?: not null)?>", kind)
        return inner is not None and fits(inner[1])

    return fit


def _no_hint(kind: str) -> str:
    return ""


@dataclass(frozen=True)
class Column:
    """What a task needs of the column of a key, such as `text`.

    Attributes:
        what: it holds, for messages.
        fits: tests an Arrow type.
        usual: its usual names, in lower case.
        unlikely: measures the values of a column; of columns without a usual name, the one with
            the smallest measure is chosen. None: the first.
        hint: Arrow type of a column that does not fit -> a sentence that may help, or nothing.
    """

    what: str
    fits: Callable[[str], bool]
    usual: tuple[str, ...] = ()
    unlikely: Callable[[Sequence[Any]], Any] | None = None
    hint: Callable[[str], str] = _no_hint

    def fitting(self, columns: Mapping[str, str]) -> list[str]:
        """Returns the names of the columns that fit.

        Args:
            columns: name -> Arrow type.
        """
        return [name for name, kind in columns.items() if self.fits(kind)]

    def is_usual(self, name: str) -> bool:
        """Whether a column has a usual name."""
        return name.casefold() in self.usual


def place_in_dataset(lines: Lines, number: int | None) -> Callable[[str], Place]:
    """Returns a function from a key of a dataset to its place, which names it.

    Args:
        lines: the run file's line numbers.
        number: of the dataset in `datasets`; None: it is the only one.
    """
    inside = "dataset" if number is None else f"datasets[{number}]"
    where: tuple[str | int, ...] = ("dataset",) if number is None else ("datasets", number)

    def place(key: str) -> Place:
        return replace(lines.place(*where, key.partition(":")[0]), name=f"{inside}.{key}")

    return place
