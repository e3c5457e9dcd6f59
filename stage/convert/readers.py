"""CSV, JSON, text and Arrow files as streams of batches.

The types of columns come from all of the data: a first pass finds the type that holds every value,
a second pass reads with it. So row 1,000,000 cannot fail because of types found in the first rows.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.ipc as ipc
import pyarrow.parquet as pq

from stage.convert.csv_files import CsvColumns, CsvFile, check_header
from stage.convert.parquet_writer import first_unfit
from stage.convert.plain_text import (
    NotReadable,
    OtherEncoding,
    check_text,
    open_text,
)
from stage.errors import DamageError, Mistakes, UsageError
from stage.files import human_size
from stage.paths import printable

# (schema of a file, its batches under a schema)
Reader = tuple[Callable[[Path], pa.Schema], Callable[[Path, pa.Schema], Iterator[pa.RecordBatch]]]

HUGGINGFACE = b"huggingface"  # the key of `datasets` in the metadata of a schema
ROWS = 10_000  # JSON objects or lines of text per batch
MAX_VALUE = 64 * 2**20  # characters of one JSON value or one line
_READ = 1 << 20
_SPACE = " \t\r\n"  # of JSON


def common_schema(
    how: str,
    files: Sequence[tuple[str, Path]],
    what: str,
    separator: str | None = None,
    note: Callable[[str], None] = lambda line: None,
) -> pa.Schema:
    """The schema that holds every row of all these files.

    Args:
        how: `csv`, or a key of `READERS`.
        files: name in messages, and path, of each.
        what: names the asset in messages.
        separator: between the cells of a CSV; None: as the suffixes of the files say.
        note: called with a line for each column of a CSV that begins with numbers and is text.

    Raises:
        UsageError: there is none; names all files that cannot be read.
    """
    schema: pa.Schema | None = None
    csv_columns = CsvColumns(CsvFile(separator))
    first_with: dict[str, str] = {}  # column -> file
    mistakes = Mistakes()
    for name, path in files:
        with mistakes, _Located(what, name):
            if how == "csv":
                csv_columns.look_at(path)
                schema = found = csv_columns.schema()
            else:
                found = READERS[how][0](path)
                schema = pa.unify_schemas([schema or found, found], promote_options="permissive")
            for column in found.names:
                first_with.setdefault(column, name)
    mistakes.check(what)
    assert schema is not None
    for line in csv_columns.notes():
        note(line)
    schema = pa.schema([_null_as_text(field) for field in schema], metadata=schema.metadata)
    if unfit := first_unfit(schema):
        column, problem = unfit
        raise UsageError(
            f"{what}: {first_with[column]}: parquet cannot hold the column {printable(column)}: "
            f"{problem}.",
            "Remove it from the file, or write it as text (in JSON: as a string), "
            "then fetch again.",
        )
    return schema


def rows_of(
    how: str,
    files: Sequence[tuple[str, Path]],
    schema: pa.Schema,
    what: str,
    separator: str | None = None,
) -> Iterator[pa.RecordBatch]:
    """The rows of several files, one after the other.

    Args:
        schema: from `common_schema`; the others are as for it.

    Raises:
        UsageError: a file cannot be read; names it.
        DamageError: an Arrow file is damaged.
    """
    rows = CsvFile(separator).rows if how == "csv" else READERS[how][1]
    for name, path in files:
        with _Located(what, name):
            yield from rows(path, schema)


def check_csv(name: str, path: Path, what: str, separator: str | None, or_omit: str) -> None:
    """Checks the header of a CSV, long before the conversion. `or_omit`: as for `check_header`.

    Raises:
        UsageError: it has another encoding or another separator.
    """
    with _Located(what, name):
        check_header(path, separator, or_omit)


class _Located:
    """Converts errors of pyarrow and json to a `UsageError` with the file's name."""

    def __init__(self, what: str, name: str) -> None:
        self._what, self._name = what, name

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        where = f"{self._what}: {self._name}"
        if isinstance(error, RecursionError):
            raise UsageError(f"{where}: nested too deeply.", _REPAIR) from None
        if isinstance(error, OtherEncoding):
            raise UsageError(f"{where}: {error}", error.advice(self._name)) from None
        if isinstance(error, NotReadable):
            raise UsageError(f"{where}: {error}", error.remedy or _REPAIR) from None
        if isinstance(error, pa.ArrowException | ValueError | OSError | TypeError | EOFError):
            if isinstance(error, OSError) and error.errno is not None:
                return
            raise UsageError(f"{where}: {' '.join(str(error).split())[:300]}", _REPAIR) from None


_REPAIR = "Fix that in the file, or convert it yourself and name the parquet with `path:`."


def _null_as_text(field: pa.Field) -> pa.Field:
    """A column without any value becomes a column of text."""
    return pa.field(field.name, pa.string()) if pa.types.is_null(field.type) else field


def _json_values(path: Path) -> Iterator[Any]:
    """The objects of a JSON file, in arrays or without; the file is never whole in memory.

    Raises:
        ValueError: with the line; not JSON, or an array with a fault.
    """
    check_text(path, may_be_page=False)
    with open_text(path, newline=None) as stream:
        # place: "start", "bare", "in an array" (a value is next), "behind a value" (of an array),
        # or "behind an array"
        text, at, line, place = stream.read(_READ), 0, 1, "start"
        opened, wanted = False, _READ
        while True:
            end = at
            while end < len(text) and text[end] in _SPACE:
                end += 1
            line, at = line + text.count("\n", at, end), end
            if step := _after_mark(text[at : at + 1], place, opened):
                (place, opened), at = step, at + 1
                continue
            _check_value_may_follow(place, text[at : at + 20], line)
            try:
                value, end = _DECODER.raw_decode(text, at)
            except json.JSONDecodeError as error:
                more = stream.read(wanted)
                if not more:
                    if place in ("in an array", "behind a value") or text[at:].strip():
                        raise ValueError(
                            f"line {line + text.count(_LINE_END, at, error.pos)}: "
                            f"not JSON: {error.msg}"
                        ) from None
                    return
                if len(text) - at > MAX_VALUE:
                    raise ValueError(
                        f"line {line}: not JSON, or one value of more than {human_size(MAX_VALUE)}"
                    ) from None
                text, at, wanted = text[at:] + more, 0, max(_READ, len(text) - at)
                continue
            except _AmbiguousJson as error:
                raise ValueError(f"the object that begins in line {line}: {error}") from None
            if end == len(text) and (more := stream.read(_READ)):  # a number may continue
                text, at = text[at:] + more, 0
                continue
            place = "behind a value" if place == "in an array" else "bare"
            yield value
            line, at = line + text.count("\n", at, end), end


_LINE_END = "\n"


def _after_mark(mark: str, place: str, opened: bool) -> tuple[str, bool] | None:
    """The place after a bracket or a comma between values; None for other characters.

    Args:
        opened: the array has no value yet. A `]` is not allowed after a comma.
    """
    if mark == "[" and place in ("start", "behind an array"):
        return "in an array", True
    if mark == "]" and (place == "behind a value" or (place == "in an array" and opened)):
        return "behind an array", opened
    if mark == "," and place == "behind a value":
        return "in an array", False
    return None


def _check_value_may_follow(place: str, rest: str, line: int) -> None:
    if rest and place == "behind an array":
        raise ValueError(
            f"line {line}: after the end of an array comes {rest!r}, which is not another array"
        )
    if rest and place == "behind a value":
        raise ValueError(f"line {line}: between two values of an array is no comma: {rest!r}")


class _AmbiguousJson(Exception):
    """Valid JSON that parsers read differently."""


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        raise _AmbiguousJson(
            f"the key {next(key for key in keys if keys.count(key) > 1)!r} is in one object twice"
        )
    return found


def _number(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise _AmbiguousJson(f"{text[:40]} is more than a float64 holds")
    return number


_DECODER = json.JSONDecoder(object_pairs_hook=_each_key_once, parse_float=_number)


def _json_lines(path: Path) -> Iterator[Any]:
    check_text(path, may_be_page=False)
    with open_text(path, newline=None) as stream:
        for number, line in enumerate(_lines(stream), 1):
            if line.strip():
                try:
                    yield _DECODER.decode(line)
                except json.JSONDecodeError as error:
                    raise ValueError(f"line {number} is not JSON: {error.msg}") from None
                except _AmbiguousJson as error:
                    raise ValueError(f"line {number}: {error}") from None


def _json_reader(values: Callable[[Path], Iterator[Any]]) -> Reader:
    def structs(path: Path, type_: pa.DataType | None) -> Iterator[pa.RecordBatch]:
        first = 1
        for rows in _in_batches(values(path)):
            for number, row in enumerate(rows, first):
                if not isinstance(row, dict):
                    raise ValueError(f"row {number} is not an object but {type(row).__name__}")
            place = f"rows {first} to {first + len(rows) - 1}"
            try:
                array = pa.array(rows, type=type_)
            except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
                raise ValueError(f"{place} do not have one type per column: {error}") from None
            except OverflowError:
                raise ValueError(
                    f"{place}: a whole number does not fit 64 bits; write it as a string"
                ) from None
            if type_ is None and _has_truth_among_fractions(rows, array.type):
                raise ValueError(
                    f"{place} do not have one type per column: true or false among fractions"
                )
            yield pa.RecordBatch.from_struct_array(array)
            first += len(rows)

    def schema_of(path: Path) -> pa.Schema:
        schema = pa.schema([])
        for batch in structs(path, None):
            try:
                schema = pa.unify_schemas([schema, batch.schema], promote_options="permissive")
            except pa.ArrowTypeError as error:
                raise ValueError(f"rows do not have one type per column: {error}") from None
        if not schema.names:
            raise ValueError("no rows, so no columns")
        return schema

    def rows(path: Path, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        yield from structs(path, pa.struct(list(schema)))

    return schema_of, rows


def _has_truth_among_fractions(values: Sequence[Any], type_: pa.DataType) -> bool:
    """Whether pyarrow converted a true to 1.0, as in a column that begins with a fraction."""
    if pa.types.is_floating(type_):
        return any(value is True or value is False for value in values)
    there = [value for value in values if value is not None]
    if pa.types.is_struct(type_):
        return any(
            _has_truth_among_fractions([v.get(part.name) for v in there], part.type)
            for part in type_
        )
    if pa.types.is_list(type_):
        return _has_truth_among_fractions(
            [item for value in there for item in value], type_.value_type
        )
    return False


def _in_batches(values: Iterator[Any]) -> Iterator[list[Any]]:
    batch: list[Any] = []
    for value in values:
        batch.append(value)
        if len(batch) == ROWS:
            yield batch
            batch = []
    if batch:
        yield batch


def _lines(stream: IO[str]) -> Iterator[str]:
    while line := stream.readline(MAX_VALUE):
        if len(line) == MAX_VALUE and not line.endswith("\n"):
            raise ValueError(f"a line of more than {human_size(MAX_VALUE)}")
        yield line.removesuffix("\n")


def _text_schema(path: Path) -> pa.Schema:
    return pa.schema([pa.field("text", pa.string())])


def _text_rows(path: Path, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    check_text(path)
    with open_text(path, newline=None) as stream:
        for lines in _in_batches(_lines(stream)):
            yield pa.record_batch([pa.array(lines, pa.string())], schema=schema)


def _open_arrow(path: Path) -> Iterator[pa.RecordBatch | pa.Schema]:
    """First the schema, then the batches, of an IPC file or stream."""
    with open(path, "rb") as file:
        is_file = file.read(6) == b"ARROW1"
    with pa.OSFile(str(path)) as source:
        if is_file:
            with ipc.open_file(source) as reader:
                yield reader.schema
                for index in range(reader.num_record_batches):
                    yield reader.get_batch(index)
        else:
            with ipc.open_stream(source) as stream:
                yield stream.schema
                yield from stream


def _arrow_schema(path: Path) -> pa.Schema:
    return next(iter(_open_arrow(path)))


def _arrow_rows(path: Path, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    for batch in _open_arrow(path):
        if isinstance(batch, pa.RecordBatch):
            try:
                batch.validate(full=True)
            except pa.ArrowInvalid as error:
                raise DamageError(f"{path.name}: damaged: {error}", "Get the file again.") from None
            yield from pa.Table.from_batches([batch]).cast(schema).to_batches()


def _parquet_schema(path: Path) -> pa.Schema:
    """The columns; pandas' categories become what they stand for."""
    fields = [
        field.with_type(field.type.value_type) if pa.types.is_dictionary(field.type) else field
        for field in pq.read_schema(path)
    ]
    return pa.schema(fields)


def _parquet_rows(path: Path, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=ROWS):
            yield from pa.Table.from_batches([batch]).select(schema.names).cast(schema).to_batches()


def with_classes_of(path: Path, schema: pa.Schema) -> pa.Schema:
    """The schema with what `datasets` wrote into a parquet file: images, and names of classes."""
    features = (pq.read_schema(path).metadata or {}).get(HUGGINGFACE)
    return schema.with_metadata({HUGGINGFACE: features}) if features else schema


READERS: dict[str, Reader] = {
    "json": _json_reader(_json_values),
    "jsonl": _json_reader(_json_lines),
    "text": (_text_schema, _text_rows),
    "arrow": (_arrow_schema, _arrow_rows),
    "parquet": (_parquet_schema, _parquet_rows),
}
