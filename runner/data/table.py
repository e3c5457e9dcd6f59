"""Reads the rows of a split in batches: parquet files -> lists of values per column."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

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
