"""A task as the run file sees it: its keys, and what its columns must hold by Arrow type. Pure.

`runner.data` and `runner.tasks` add what else a task is. So the reader of a run file asks a task
without importing what it is built from.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

from runner.config.data import DatasetConfig
from runner.config.fields import found_tasks
from runner.from_stage import Lines, Mistakes, Place, UsageError, Where, suggest


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


@dataclass(frozen=True)
class Column:
    """What a task needs of the column of a key, such as `text`.

    Attributes:
        what: it holds, for messages.
        fits: tests an Arrow type.
        usual: its usual names, in lower case.
        unlikely: measures the values of a column; of columns without a usual name, the one with
            the smallest measure is chosen. None: the first.
        hint: Arrow type of a column that does not fit -> a sentence that may help; None: no such.
    """

    what: str
    fits: Callable[[str], bool]
    usual: tuple[str, ...] = ()
    unlikely: Callable[[Sequence[Any]], Any] | None = None
    hint: Callable[[str], str] | None = None

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


OF_TOKENS = ("sequence_length", "add_tokens", "add_special_tokens")
"""The keys of the run file that all tasks with tokens have."""


@dataclass(frozen=True, kw_only=True)
class TaskKeys:
    """The keys of a task.

    Attributes:
        name: in the run file.
        reads: key of a dataset -> what its column must hold.
        settings: its other keys of a dataset.
        own_keys: its other keys of the run file, beside `OF_TOKENS`.
        class_key: the key of the column with its classes; empty: it has none.
        has_tokens: False: it reads images.
    """

    name: str
    reads: Mapping[str, Column] = field(repr=False)
    settings: tuple[str, ...] = ()
    own_keys: tuple[str, ...] = ()
    class_key: str = ""
    has_tokens: bool = True

    @property
    def dataset_keys(self) -> tuple[str, ...]:
        """The keys of a dataset that belong to this task, and not to every task."""
        return (*self.reads, *self.settings)

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of the run file and of its datasets that not every task has."""
        of_tokens = OF_TOKENS if self.has_tokens else ()
        return (*self.dataset_keys, *self.own_keys, *of_tokens)

    @property
    def has_classes(self) -> bool:
        """Whether it learns classes; the head of its model is new for other ones."""
        return bool(self.class_key)

    def columns(self, dataset: DatasetConfig) -> dict[str, str]:
        """Returns key of the run file -> the column that is read."""
        return {key: column for key in self.reads if (column := getattr(dataset, key))}

    def expected(self, key: str, dataset: DatasetConfig) -> Column:
        """Returns what the column of a key must hold."""
        return self.reads[key]

    def hint_for_missing(self, key: str, columns: Mapping[str, str]) -> str:
        """Returns what may help where the column of a key is missing: a sentence, or nothing.

        Args:
            columns: name -> Arrow type, of the split.
        """
        return ""

    def check_dataset(self, dataset: DatasetConfig, where: Where, lines: Lines) -> None:
        """Refuses keys of a dataset that contradict each other.

        Args:
            where: the keys that lead to it.

        Raises:
            UsageError: with file:line.
        """

    def check_columns(
        self,
        dataset: DatasetConfig,
        columns: Mapping[str, str],
        split: str,
        where: Callable[[str], Place],
        mistakes: Mistakes,
        unknown: Set[str] = frozenset(),
    ) -> None:
        """Finds the columns of a split that are missing or have another type.

        Args:
            dataset: what the run file sets for the dataset.
            columns: name -> Arrow type, of the split.
            split: name of the split.
            where: key of the dataset -> its place, which names it.
            mistakes: keeps what is found, as UsageErrors that list the columns.
            unknown: keys of the dataset whose values are not known; they are not checked.
        """
        for named, column in self.columns(dataset).items():
            if named.partition(":")[0] in unknown or not column:  # missing: found without a bundle
                continue
            with mistakes:
                self._check_column(dataset, (named, column), columns, split, where)

    def _check_column(
        self,
        dataset: DatasetConfig,
        named: tuple[str, str],
        columns: Mapping[str, str],
        split: str,
        where: Callable[[str], Place],
    ) -> None:
        """Refuses one column: `named` is its key in the run file, and its name."""
        name, column = named
        key = name.partition(":")[0]
        expected = self.expected(key, dataset)
        if column not in columns:
            raise UsageError(
                f"the split `{split}` of `{dataset.asset}` has no such column.",
                suggest(
                    column,
                    columns,
                    f"Its columns: {', '.join(f'{c} ({t})' for c, t in columns.items())}."
                    + self.hint_for_missing(key, columns),
                ),
                place=where(name if key == "format" else f"{key}: {column}"),
            )
        if not expected.fits(columns[column]):
            others = ", ".join(expected.fitting(columns)) or "none"
            raise UsageError(
                f"that column of `{dataset.asset}` holds {columns[column]}, not {expected.what}.",
                f"Columns of {expected.what}: {others}."
                + (expected.hint(columns[column]) if expected.hint else ""),
                place=where(f"{key}: {column}"),
            )


def keys_of_task(name: str) -> TaskKeys:
    """Returns the keys of the task for a run file's `task`."""
    task: TaskKeys = found_tasks()[name]
    return task
