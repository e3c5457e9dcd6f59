"""Rows of a split, some at a time: parquet -> lists of columns' values, up to the limit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from runner.inputs import SplitInput

ROWS_AT_ONCE = 1000  # read and worked on together: bounds the memory


def columns(
    split: SplitInput, names: list[str], limit: int | None, at_once: int = ROWS_AT_ONCE
) -> Iterator[dict[str, list[Any]]]:
    """Column name -> values, for up to `at_once` rows a time, in the order of the files."""
    import pyarrow.parquet as pq

    left = limit if limit is not None else split.rows
    for path in split.files:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=at_once, columns=names):
                if left <= 0:
                    return
                batch = batch.slice(0, left)
                left -= batch.num_rows
                yield {name: batch.column(name).to_pylist() for name in names}
