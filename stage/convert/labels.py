"""Class names that a dataset's card gives: columns of whole numbers, or of those names, become `ClassLabel`s.

As `datasets` does when it loads the files (its features/features.py: `Features._from_yaml_list` and
`ClassLabel.cast_storage`): a name becomes its number, a number stays, -1 is no class, null stays null. Where the rows
do not fit what the card says, that is told, and the column stays as it is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from stage.disk import some_of

Classes = Mapping[str, Sequence[str]]  # column -> the names of its classes, in order
_HUGGINGFACE = b"huggingface"
_SHOWN = 5  # names


def declared(features: Any, tell: Callable[[str], None]) -> dict[str, tuple[str, ...]]:
    """The class names that a card's `dataset_info.features` gives to columns.

    Args:
        features: its YAML: a list of `{name, dtype}`, where `dtype` may be `{class_label: {names: {'0': ...}}}`.
        tell: hears which are not taken, and why.
    """
    classes = {}
    for feature in features if isinstance(features, list) else []:
        if not isinstance(feature, dict) or not isinstance(feature.get("name"), str):
            continue
        column, dtype = feature["name"], feature.get("dtype", feature)
        if isinstance(dtype, dict) and isinstance(dtype.get("class_label"), dict):
            names = _names(dtype["class_label"].get("names"))
            if names is None:
                tell(f"{_not_taken(column)}: they are no list of different texts, numbered from 0")
            else:
                classes[column] = names
        elif _mentions_classes(feature):
            tell(f"{_not_taken(column)}: they are of what is inside of a list or struct")
    return classes


def _names(names: Any) -> tuple[str, ...] | None:
    if isinstance(names, dict):
        numbered = {str(number): name for number, name in names.items()}
        names = [numbered.get(str(number)) for number in range(len(numbered))]
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        return None
    return tuple(names) if len(set(names)) == len(names) else None


def _mentions_classes(feature: Any) -> bool:
    waiting, seen = [feature], set[int]()  # an alias of YAML is the same object: a few of them can stand for millions
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, dict) and "class_label" in value:
            return True
        waiting += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return False


def _not_taken(column: str) -> str:
    return f"the card's class names for `{column}` are not taken"


def fitting(
    schema: pa.Schema, classes: Classes, rows: Callable[[], Iterable[pa.RecordBatch]], tell: Callable[[str], None]
) -> Classes:
    """Those classes that every row fits.

    Args:
        rows: all rows of all splits; read once more if there is a column to look at.
        tell: hears which do not fit, and why.
    """
    problems = {column: _problem_with_type(schema, column) for column in classes}
    if not all(problems.values()):
        for batch in rows():
            for column, problem in problems.items():
                problems[column] = problem or _problem_with_values(batch.column(column), classes[column])
    for column, problem in problems.items():
        if problem:
            tell(f"{_not_taken(column)}: {problem}")
        else:
            tell(f"`{column}` has the class names of the card: {some_of(classes[column], _SHOWN)}")
    return {column: names for column, names in classes.items() if not problems[column]}


def _problem_with_type(schema: pa.Schema, column: str) -> str | None:
    index = schema.get_field_index(column)
    if index < 0:
        return "there is no such column"
    type_ = schema.field(index).type
    if pa.types.is_integer(type_) or _is_text(type_):
        return None
    return f"it is a column of {type_}, not of whole numbers or text"


def _is_text(type_: pa.DataType) -> bool:
    return bool(pa.types.is_string(type_) or pa.types.is_large_string(type_))


def _problem_with_values(values: pa.Array, names: Sequence[str]) -> str | None:
    for value in pc.unique(values).to_pylist():
        if value is not None and _number(value, names) is None:
            return f"it holds {value!r}, and the {len(names)} names are {some_of(names, _SHOWN)}"
    return None


def _number(value: int | str, names: Sequence[str]) -> int | None:
    """The number of a class; None if it is none. A text may also be the number itself."""
    if isinstance(value, str):
        for name in (value, value.strip()):
            if name in names:
                return names.index(name)
    try:
        number = int(value)
    except ValueError:
        return None
    return number if -1 <= number < len(names) else None


def tell_of_images(schema: pa.Schema, classes: Classes, tell: Callable[[str], None]) -> None:
    """Says what is not taken for images: `datasets` goes by the names of their folders there, whatever a card says."""
    features = _note((schema.metadata or {}).get(_HUGGINGFACE, b"{}"))["info"].get("features") or {}
    for column, names in classes.items():
        found = features.get(column, {}).get("names")
        if found != list(names):
            folders = f"its folders are {some_of(found, _SHOWN)}" if found else "no folders name them"
            tell(f"{_not_taken(column)}: {folders}, and `datasets` goes by that")


def labelled_schema(schema: pa.Schema, classes: Classes) -> pa.Schema:
    """The schema with those columns as numbers, and with the note by which `datasets` knows their names."""
    for column in classes:
        schema = schema.set(schema.get_field_index(column), pa.field(column, pa.int64()))
    metadata = dict(schema.metadata or {})
    note = _note(metadata.get(_HUGGINGFACE, b"{}"))
    labels = {column: {"names": list(names), "_type": "ClassLabel"} for column, names in classes.items()}
    features = {**(note["info"].get("features") or {}), **labels}
    note["info"] = {**note["info"], "features": features}
    return schema.with_metadata({**metadata, _HUGGINGFACE: json.dumps(note)})


def _note(text: bytes) -> dict[str, Any]:
    """What an Arrow file says of its columns already; nothing that can be read is nothing."""
    try:
        note = json.loads(text)
    except ValueError:
        note = None
    info = note.get("info") if isinstance(note, dict) else None
    features = info.get("features") or {} if isinstance(info, dict) else None
    return note if isinstance(features, dict) else {"info": {}}


def labelled(batches: Iterable[pa.RecordBatch], schema: pa.Schema, classes: Classes) -> Iterator[pa.RecordBatch]:
    """The rows with numbers in place of names.

    Args:
        schema: of `labelled_schema`.
        classes: of `fitting`.
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
    numbers = pa.array([None if v is None else _number(v, names) for v in known.to_pylist()], pa.int64())
    return numbers.take(pc.index_in(values, value_set=known))
