"""The classes of a column: their names, and one numbering for all datasets of a run.

Names come from the metadata of `datasets` in the parquet file (ClassLabel), or they are the texts
of the column, or the numbers 0, 1, ... up to the largest. Each store numbers its own classes. The
first training dataset's numbers are those of the model; `united` gives them to the others, by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from runner.config.task_keys import keys_of_task
from runner.data.recipe import Recipe
from runner.data.table import batches, reading, row_of
from runner.errors import UsageError
from runner.inputs import SplitInput

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
