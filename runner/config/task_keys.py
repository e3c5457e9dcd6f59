"""A task as the run file and the columns of a bundle see it: its keys and columns. Pure.

`runner.data` and `runner.tasks` add what else a task is. So the reader of a run file asks a task
without importing what it is built from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field

from runner.config.columns import Column
from runner.config.data import DatasetConfig
from runner.config.tasks import found_tasks
from runner.errors import Lines, Mistakes, Place, UsageError, Where, suggest

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
                f"Columns of {expected.what}: {others}." + expected.hint(columns[column]),
                place=where(f"{key}: {column}"),
            )


def keys_of_task(name: str) -> TaskKeys:
    """Returns the keys of the task for a run file's `task`."""
    task: TaskKeys = found_tasks()[name]
    return task
