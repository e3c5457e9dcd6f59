"""Class names of a dataset's card: columns of whole numbers or of these names become `ClassLabel`.

`datasets` does the same when it loads the files (its features/features.py:
`Features._from_yaml_list` and `ClassLabel.cast_storage`): a name becomes its number, a number
stays, -1 is no class, null stays null. Where the rows do not fit the card, a note is printed and
the column does not change.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from stage.files import join_limited

Classes = Mapping[str, Sequence[str]]  # column -> the names of its classes, in order
_HUGGINGFACE = b"huggingface"
_SHOWN = 5  # names


def declared(features: Any, note: Callable[[str], None]) -> dict[str, tuple[str, ...]]:
    """The class names of columns in a card's `dataset_info.features`.

    Args:
        features: the YAML: a list of `{name, dtype}`, where `dtype` may be
            `{class_label: {names: {'0': ...}}}`.
        note: called with each line about class names that are ignored, with the reason.
    """
    classes = {}
    for feature in features if isinstance(features, list) else []:
        if not isinstance(feature, dict) or not isinstance(feature.get("name"), str):
            continue
        column, dtype = feature["name"], feature.get("dtype", feature)
        if isinstance(dtype, dict) and isinstance(dtype.get("class_label"), dict):
            names = _names(dtype["class_label"].get("names"))
            if names is None:
                note(f"{_ignored(column)}: they are no list of different texts, numbered from 0")
            else:
                classes[column] = names
        elif _mentions_classes(feature):
            note(f"{_ignored(column)}: they are of what is inside of a list or struct")
    return classes


def _names(names: Any) -> tuple[str, ...] | None:
    if isinstance(names, dict):
        numbered = {str(number): name for number, name in names.items()}
        names = [numbered.get(str(number)) for number in range(len(numbered))]
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        return None
    return tuple(names) if len(set(names)) == len(names) else None


def _mentions_classes(feature: Any) -> bool:
    # Aliases of YAML are one object in several places: a few can expand to millions of values.
    waiting, seen = [feature], set[int]()
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, dict) and "class_label" in value:
            return True
        waiting += (
            value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        )
    return False


def _ignored(column: str) -> str:
    return f"the card's class names for `{column}` are ignored"


def fitting(
    schema: pa.Schema,
    classes: Classes,
    rows: Callable[[], Iterable[pa.RecordBatch]],
    note: Callable[[str], None],
) -> Classes:
    """The classes that all rows fit.

    Args:
        rows: returns all rows of all splits; called only if the types fit.
        note: called with a line per column: whether its class names are used, and if not, why.
    """
    problems = {column: _problem_with_type(schema, column) for column in classes}
    if not all(problems.values()):
        for batch in rows():
            for column, problem in problems.items():
                problems[column] = problem or _problem_with_values(
                    batch.column(column), classes[column]
                )
    for column, problem in problems.items():
        if problem:
            note(f"{_ignored(column)}: {problem}")
        else:
            names = join_limited(classes[column], _SHOWN)
            note(f"`{column}` has the class names of the card: {names}")
    return {column: names for column, names in classes.items() if not problems[column]}


def _problem_with_type(schema: pa.Schema, column: str) -> str | None:
    index = schema.get_field_index(column)
    if index < 0:
        return "there is no such column"
    type_ = schema.field(index).type
    if pa.types.is_integer(type_) or is_text(type_):
        return None
    return f"it is a column of {type_}, not of whole numbers or text"


def is_text(type_: pa.DataType) -> bool:
    """Whether an Arrow type is a string type."""
    return bool(pa.types.is_string(type_) or pa.types.is_large_string(type_))


def _problem_with_values(values: pa.Array, names: Sequence[str]) -> str | None:
    for value in pc.unique(values).to_pylist():
        if value is not None and _number(value, names) is None:
            return (
                f"it holds {value!r}, and the {len(names)} names are {join_limited(names, _SHOWN)}"
            )
    return None


def _number(value: int | str, names: Sequence[str]) -> int | None:
    """The number of a class, given its name or its number, also as text; None if it is no class."""
    if isinstance(value, str):
        for name in (value, value.strip()):
            if name in names:
                return names.index(name)
    try:
        number = int(value)
    except ValueError:
        return None
    return number if -1 <= number < len(names) else None


def note_image_classes(schema: pa.Schema, classes: Classes, note: Callable[[str], None]) -> None:
    """Reports class names of a card that images do not get.

    `datasets` uses the names of the images' folders instead, whatever the card says.
    """
    features = _features_of(schema)["info"].get("features") or {}
    for column, names in classes.items():
        found = features.get(column, {}).get("names")
        if found != list(names):
            folders = (
                f"its folders are {join_limited(found, _SHOWN)}"
                if found
                else "no folders name them"
            )
            note(f"{_ignored(column)}: {folders}, and `datasets` uses the folders")


def labelled_schema(schema: pa.Schema, classes: Classes) -> pa.Schema:
    """The schema with these columns as numbers, and with their names for `datasets`."""
    for column in classes:
        schema = schema.set(schema.get_field_index(column), pa.field(column, pa.int64()))
    return with_features(schema, class_label_features(classes))


def class_label_features(classes: Classes) -> dict[str, Any]:
    """Column -> its `ClassLabel`, as `datasets` writes it in JSON."""
    return {
        column: {"names": list(names), "_type": "ClassLabel"} for column, names in classes.items()
    }


def with_features(schema: pa.Schema, features: Mapping[str, Any]) -> pa.Schema:
    """Adds the types of columns in `datasets` (its `Features` as JSON) to the schema's metadata."""
    document = _features_of(schema)
    features = {**(document["info"].get("features") or {}), **features}
    document["info"] = {**document["info"], "features": features}
    return schema.with_metadata({**(schema.metadata or {}), _HUGGINGFACE: json.dumps(document)})


def _features_of(schema: pa.Schema) -> dict[str, Any]:
    """The `Features` that a schema has already; empty if there are none, or they cannot be read."""
    try:
        document = json.loads((schema.metadata or {}).get(_HUGGINGFACE, b"{}"))
    except ValueError:
        document = None
    info = document.get("info") if isinstance(document, dict) else None
    features = info.get("features") or {} if isinstance(info, dict) else None
    return document if isinstance(features, dict) else {"info": {}}


def labelled(
    batches: Iterable[pa.RecordBatch], schema: pa.Schema, classes: Classes
) -> Iterator[pa.RecordBatch]:
    """The rows, with numbers in place of names.

    Args:
        schema: from `labelled_schema`.
        classes: from `fitting`.
    """
    for batch in batches:
        columns = [
            _numbers(batch.column(field.name), classes[field.name])
            if field.name in classes
            else batch.column(field.name)
            for field in schema
        ]
        yield pa.record_batch(columns, schema=schema)


def _numbers(values: pa.Array, names: Sequence[str]) -> pa.Array:
    if pa.types.is_integer(values.type):
        return values.cast(pa.int64())
    known = pc.unique(values)
    numbers = pa.array(
        [None if v is None else _number(v, names) for v in known.to_pylist()], pa.int64()
    )
    return numbers.take(pc.index_in(values, value_set=known))
