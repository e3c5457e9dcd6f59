"""Which columns of a dataset a task reads: by their names, else by what their first rows hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from runner.config.columns import Column
from runner.data.table import columns as read_columns
from runner.inputs import SplitInput

ROWS = 1000  # of the training split are looked at


class Chosen(NamedTuple):
    """The columns that `runner init` chooses for a task.

    Attributes:
        columns: key of the run file -> its column, or `format` -> a text with columns; empty: none
            fit the task.
        others: key -> other columns that it could be.
        unusual: the keys whose column does not have a usual name.
    """

    columns: dict[str, str]
    others: dict[str, list[str]]
    unusual: tuple[str, ...]


def choose_columns(
    wanted: Mapping[str, Column], split: SplitInput, known: Mapping[str, str] | None = None
) -> Chosen:
    """Chooses a column for each key.

    Args:
        wanted: key -> what its column must hold.
        split: the training split; its rows are read only where names do not decide.
        known: keys whose columns are chosen already.

    Raises:
        DamageError: a file cannot be read.
    """
    chosen = dict(known or {})
    others: dict[str, list[str]] = {}
    unusual: list[str] = []
    for key, column in wanted.items():
        if key in chosen:
            continue
        able = [name for name in column.fitting(split.columns) if name not in chosen.values()]
        if not able:
            return Chosen({}, {}, ())
        chosen[key] = _best(column, able, split)
        others[key] = [name for name in able if name != chosen[key]]
        if not column.is_usual(chosen[key]):
            unusual.append(key)
    return Chosen(chosen, others, tuple(unusual))


def _best(column: Column, able: Sequence[str], split: SplitInput) -> str:
    """The column with a usual name; else the one whose values are the most likely."""
    usual = [name for name in able if column.is_usual(name)]
    if usual or len(able) == 1 or column.unlikely is None:
        return (usual or able)[0]
    values: dict[str, list[Any]] = {name: [] for name in able}
    for batch in read_columns(split, list(able), ROWS):
        for name, some in batch.items():
            values[name] += [value for value in some if value is not None]
    unlikely = column.unlikely
    return min(able, key=lambda name: unlikely(values[name]))
