"""Reads the rows of a split in batches, and the classes of a column.

Names of classes come from the metadata of `datasets` in the parquet file (ClassLabel), or they are
the texts of the column, or the numbers 0, 1, ... up to the largest. Each store numbers its own
classes. The first training dataset's numbers are those of the model; `united` gives them to the
others, by name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from runner.config.task_keys import keys_of_task
from runner.data.recipe import Recipe
from runner.from_stage import UsageError
from runner.inputs import SplitInput, unreadable

T = TypeVar("T")

ROWS_AT_ONCE = 1000  # bounds the memory
MOST_ROWS = 20_000
"""A check looks at no more: larger datasets fill a step, and to read them takes over a second."""


def batches(split: SplitInput, names: Sequence[str], at_once: int = 2**16) -> Iterator[Any]:
    """Yields the record batches of a split's files, in their order: all rows, whatever its part.

    Args:
        names: the columns to read.
        at_once: the most rows per batch.

    Raises:
        DamageError: a file cannot be read.
    """
    import pyarrow.parquet as pq

    for path in split.files:
        with reading(path), pq.ParquetFile(path) as file:
            yield from file.iter_batches(batch_size=at_once, columns=list(names))


def footer(path: Path) -> Any:
    """What the end of a parquet file says about its rows and columns.

    Raises:
        DamageError: the file cannot be read.
    """
    import pyarrow.parquet as pq

    with reading(path):
        return pq.read_metadata(path)


def columns(
    split: SplitInput, names: list[str], limit: int | None, at_once: int = ROWS_AT_ONCE
) -> Iterator[dict[str, list[Any]]]:
    """Yields column name -> values, for up to `at_once` rows per batch, in the order of the files.

    Args:
        split: the files.
        names: the columns to read.
        limit: the most rows to read; None: all.
        at_once: the most rows per batch.

    Raises:
        DamageError: a file cannot be read.
    """
    import pyarrow as pa

    left, first = limit if limit is not None else split.rows, 0
    for batch in batches(split, names, at_once):
        if left <= 0:
            return
        if split.part is not None:
            mask, first = split.part.mask(first, batch.num_rows), first + batch.num_rows
            batch = batch.filter(pa.array(mask))
        batch = batch.slice(0, left)
        left -= batch.num_rows
        yield {name: batch.column(name).to_pylist() for name in names}


def row_of(split: SplitInput, number: int) -> str:
    """Names a row in messages: the split, and the row's number in its files.

    Args:
        split: the files.
        number: of the row among those that `columns` yields.
    """
    if split.part is None:
        return f"split `{split.name}`, row {number}"
    return f"split `{split.name}`, row {split.part.place(number)} of the whole split"


def first_batches(split: SplitInput, names: Sequence[str]) -> Iterator[tuple[int, Any]]:
    """Yields the first rows of a split's files: the number of the first one, and the batch.

    Args:
        split: the files.
        names: the columns to read.
    """
    first = 0
    for batch in batches(split, names):
        if first >= MOST_ROWS:
            return
        yield first, batch
        first += batch.num_rows


def rows_of(split: SplitInput) -> int:
    """The rows of a split's files, from their footers."""
    return sum(footer(path).num_rows for path in split.files)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Adds the file's name to errors of Arrow, which often are `OSError`s without a name.

    Args:
        path: the file that is read in this context.

    Raises:
        DamageError: the file cannot be read.
    """
    import pyarrow as pa

    try:
        yield
    except (OSError, pa.ArrowException) as error:
        why = (getattr(error, "strerror", None) or str(error)).strip().splitlines()
        raise unreadable(path, why[0].rstrip(".") if why else type(error).__name__) from None


def read_ahead(items: Iterator[T]) -> Iterator[T]:
    """Yields the same items; the next one is made in a thread while one is used.

    Args:
        items: is used in that thread only; none of them is None.

    Raises:
        BaseException: what `items` raised, with its traceback, where its item would come.
    """
    with ThreadPoolExecutor(1, "read ahead") as thread:
        following = thread.submit(next, items, None)
        while (item := following.result()) is not None:
            following = thread.submit(next, items, None)
            yield item


NAMED = 5  # at most so many classes are named in a message
MOST_CLASSES = 1_000_000  # numbers beyond are no classes: a time, an id
COLUMNS = "`stage show BUNDLE` lists the columns."
LISTED, LONGEST = 8, 40  # at most so many where a store is described, and characters of each
NOT_GIVEN = "Stage it again with null for such a label: these rows are left out."


class Classes(NamedTuple):
    """The classes of a column.

    Attributes:
        names: of the classes 0, 1, ...
        kind: `names` (a ClassLabel), `texts` (the values are the names), or `numbers`.
    """

    names: list[str]
    kind: str

    @property
    def numbers(self) -> dict[Any, int]:
        """Value of the column -> the number of its class."""
        values = self.names if self.kind == "texts" else range(len(self.names))
        return {value: number for number, value in enumerate(values)}


def class_of(value: Any, numbers: Mapping[Any, int], split: SplitInput, row: int) -> int:
    """Returns the number of a class.

    Args:
        value: as it is in the column.
        numbers: of the known ones.
        split, row: where it is, for the message.

    Raises:
        UsageError: it is no class.
    """
    if value not in numbers:
        raise UsageError(
            f"{row_of(split, row)}: label {value}; classes count from 0 to {len(numbers) - 1}.",
            NOT_GIVEN,
        )
    return numbers[value]


def is_blank(value: Any) -> bool:
    """Whether a label is none: null, or a text of nothing but white space. Pure."""
    return value is None or (isinstance(value, str) and not value.strip())


def listed(names: Sequence[str]) -> str:
    """The first names for a line; quoted where white space or control characters hide. Pure."""
    short = [n if len(n) <= LONGEST else f"{n[:LONGEST]}..." for n in names[:LISTED]]
    shown = [n if n == n.strip() and n.isprintable() else repr(n) for n in short]
    return ", ".join([*shown, *(["..."] if len(names) > LISTED else [])])


def stated(split: SplitInput, column: str) -> list[str]:
    """Returns the names of the classes in the metadata of `datasets`; empty: there are none.

    The classes of a list are those of its elements, in each notation of `datasets`.
    """
    import pyarrow.parquet as pq

    with reading(split.files[0]):
        metadata = (pq.read_schema(split.files[0]).metadata or {}).get(b"huggingface")
    try:
        feature = json.loads(metadata or b"{}")["info"]["features"][column]
        feature = feature[0] if isinstance(feature, list) else feature
        names = feature.get("feature", feature)["names"]
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        return []
    return [str(name) for name in names] if isinstance(names, list) else []


def read_classes(recipe: Recipe) -> Classes:
    """Finds the classes of a split. The errors are those of `classes_of`."""
    column = getattr(recipe.dataset, keys_of_task(recipe.task).class_key)
    is_limited = recipe.limit is not None and recipe.limit < recipe.split.rows
    return classes_of(recipe.split, column, is_limited=is_limited)


def classes_of(split: SplitInput, column: str, *, is_limited: bool = False) -> Classes:
    """Finds the classes of a column in all rows of a split, those beyond a `limit` too.

    Args:
        split: the files.
        column: of classes, or of lists of them.
        is_limited: whether not all rows are read, so that a wrong number may not matter.

    Raises:
        UsageError: there are less than two classes, or a number is no class.
        DamageError: a file cannot be read.
    """
    names = stated(split, column)
    values = _values(split, column)
    if all(isinstance(value, str) for value in values):
        found = Classes(sorted(values), "texts")
    else:
        low, high = min(values, default=0), max(values, default=-1)
        if not is_limited:
            check_range(split.name, column, low, high, names)
        numbers = [str(number) for number in range(min(high + 1, MOST_CLASSES))]
        found = Classes(names, "names") if names else Classes(numbers, "numbers")
    if len(found.names if found.kind == "names" else values) < 2:
        raise UsageError(
            f"split `{split.name}`: "
            + (
                f"all labels in `{column}` are {found.names[-1]}"
                if found.names
                else f"`{column}` has no labels"
            )
            + ": there is nothing to learn.",
            "Look at the column (`stage show BUNDLE` lists them), or choose another split.",
        )
    return found


def _values(split: SplitInput, column: str) -> set[Any]:
    """The distinct values of a column, or of the elements of its lists; without blank ones."""
    import pyarrow as pa
    import pyarrow.compute as pc

    found: set[Any] = set()
    for batch in batches(split, [column]):
        values = batch.column(column)
        if pa.types.is_list(values.type) or pa.types.is_large_list(values.type):
            values = pc.list_flatten(values)
        found.update(pc.unique(values).to_pylist())
    return {value for value in found if not is_blank(value)}


def check_range(split: str, column: str, low: int, high: int, names: Sequence[str]) -> None:
    """Refuses numbers that are no classes.

    Args:
        split: its name, for the message.
        column: the one with the numbers.
        low, high: the lowest and the highest number.
        names: of the classes; empty: they have none.

    Raises:
        UsageError: a number is below 0, or has no name.
    """
    most = len(names) or MOST_CLASSES
    if low >= 0 and high < most:
        return
    remedy = NOT_GIVEN
    if low > 0 and high - low < len(names):
        remedy = f"Subtract {low} from each label, and stage it again."
    if low == high == -1:
        remedy = "This split has no labels (-1 in each row): choose another one."
    raise UsageError(
        f"split `{split}`: the labels in `{column}` are {low} to {high}; "
        f"classes count from 0{f' to {most - 1}' if names or high >= most else ''}.",
        remedy,
    )


def united(train: Sequence[Classes], others: Sequence[Classes]) -> list[str]:
    """Returns the names of a run's classes, in the order of the model's outputs. Pure.

    Args:
        train: of the training datasets.
        others: of the validation datasets.

    Raises:
        UsageError: some datasets have names and others numbers, or validation has a class that
            training does not have.
    """
    by_number = [classes.kind == "numbers" for classes in (*train, *others)]
    if any(by_number) and not all(by_number):
        raise UsageError(
            "some datasets name their classes, others number them: they cannot be matched.",
            "Stage them with the same kind of labels"
            + ("." if len({*by_number[: len(train)]}) > 1 else ", or set `validation: null`."),
        )
    names = list(dict.fromkeys(name for classes in train for name in classes.names))
    if all(by_number):
        names = [str(number) for number in range(len(names))]
    unknown = sorted({name for classes in others for name in classes.names} - set(names))
    if unknown:
        more = f" and {len(unknown) - NAMED} more" if len(unknown) > NAMED else ""
        raise UsageError(
            f"the validation split has classes that the training split does not have: "
            f"{', '.join(unknown[:NAMED])}{more}.",
            "Choose another validation split, or `validation: null`.",
        )
    return names
