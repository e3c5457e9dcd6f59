"""CSV, JSON, text and Arrow files as streams of batches.

Types come from the data, all of it: one pass finds the type that holds every value, a second reads with it. A file's
head decides nothing, so row 1,000,000 cannot surprise.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.ipc as ipc
import pyarrow.parquet as pq

from stage.convert.csvfiles import NotCommas, Reader, check_header, csv_reader, merged_csv
from stage.convert.writer import first_unfit
from stage.disk import human_size
from stage.errors import DamageError, UsageError
from stage.names import printable

ROWS = 10_000  # of JSON objects or lines of text a batch
MAX_VALUE = 64 * 2**20  # characters of one JSON value or one line
_READ = 1 << 20
_SPACE = " \t\r\n"  # of JSON
_BETWEEN = f"{_SPACE},"


def common_schema(how: str, files: Sequence[tuple[str, Path]], what: str, separator: str | None = None) -> pa.Schema:
    """The schema that holds every row of all these files.

    Args:
        separator: between the cells of a CSV; None: as the files' endings say.

    Raises:
        UsageError: there is none; names the file.
    """
    schema: pa.Schema | None = None
    schema_of, _ = _reader(how, separator)
    first_with: dict[str, str] = {}  # column -> file
    for name, path in files:
        with _Words(what, name):
            found = schema_of(path)
            for column in found.names:
                first_with.setdefault(column, name)
            if schema is None:
                schema = found
            elif how == "csv":
                schema = merged_csv(schema, found)
            else:
                schema = pa.unify_schemas([schema, found], promote_options="permissive")
    assert schema is not None
    schema = pa.schema([_settled(field) for field in schema], metadata=schema.metadata)
    if unfit := first_unfit(schema):
        column, problem = unfit
        raise UsageError(
            f"{what}: {first_with[column]}: parquet cannot hold the column {printable(column)}: {problem}.",
            "Leave that out of the file, or write it as text (in JSON: as a string), then fetch again.",
        )
    return schema


def rows_of(
    how: str, files: Sequence[tuple[str, Path]], schema: pa.Schema, what: str, separator: str | None = None
) -> Iterator[pa.RecordBatch]:
    """The rows of several files, one after the other."""
    _, rows = _reader(how, separator)
    for name, path in files:
        with _Words(what, name):
            yield from rows(path, schema)


def check_csv(name: str, path: Path, what: str, separator: str | None) -> None:
    """Looks at the header of a CSV, long before it is converted.

    Raises:
        UsageError: its separator is another.
    """
    with _Words(what, name):
        check_header(path, separator)


def _reader(how: str, separator: str | None) -> Reader:
    return csv_reader(separator) if how == "csv" else READERS[how]


class _Words:
    """Turns what pyarrow and json say of a file into words with the file's name."""

    def __init__(self, what: str, name: str) -> None:
        self._where = f"{what}: {name}"

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RecursionError):
            raise UsageError(f"{self._where}: nested too deeply.", _MEND) from None
        if isinstance(error, UnicodeDecodeError):
            raise UsageError(f"{self._where}: not UTF-8 ({error.reason} at byte {error.start}).", _UTF8) from None
        if isinstance(error, pa.ArrowException | ValueError | OSError | TypeError | EOFError):
            if isinstance(error, OSError) and error.errno is not None:
                return
            text = " ".join(str(error).split())[:300]
            if isinstance(error, NotCommas):
                raise UsageError(f"{self._where}: {text}", error.remedy) from None
            remedy = _UTF8 if "UTF8" in text or "UTF-8" in text else _MEND
            raise UsageError(f"{self._where}: {text}", remedy) from None


_MEND = "Mend that in the file, or convert it yourself and name the parquet with `path:`."
_UTF8 = "Convert it first: iconv -f LATIN1 -t UTF-8 FILE > NEW"


def _settled(field: pa.Field) -> pa.Field:
    """A column without a single value is a column of text."""
    return pa.field(field.name, pa.string()) if pa.types.is_null(field.type) else field


def _text_stream(path: Path) -> IO[str]:
    import io

    stream: Any = pa.input_stream(str(path), compression="detect")
    return io.TextIOWrapper(io.BufferedReader(stream), encoding="utf-8-sig", newline=None)


def _json_values(path: Path) -> Iterator[Any]:
    """The objects of a JSON file: in arrays one after the other, or bare. Never the whole file in memory."""
    decoder = json.JSONDecoder()
    with _text_stream(path) as stream:
        text, at, place = stream.read(_READ), 0, "start"
        wanted = _READ
        while True:
            while at < len(text) and text[at] in (_SPACE if place == "behind an array" else _BETWEEN):
                at += 1
            if at < len(text) and place in ("start", "behind an array") and text[at] == "[":
                place, at = "in an array", at + 1
                continue
            if at < len(text) and place == "in an array" and text[at] == "]":
                place, at = "behind an array", at + 1
                continue
            if at < len(text) and place == "behind an array":
                raise ValueError(f"behind the end of an array comes {text[at : at + 20]!r}, which is no further array")
            try:
                value, end = decoder.raw_decode(text, at)
            except json.JSONDecodeError as error:
                more = stream.read(wanted)
                if not more:
                    if place == "in an array" or text[at:].strip():
                        raise ValueError(f"no JSON from character {at} on: {error.msg}") from None
                    return
                if len(text) - at > MAX_VALUE:
                    raise ValueError(f"no JSON, or one value of more than {human_size(MAX_VALUE)}") from None
                text, at, wanted = text[at:] + more, 0, max(_READ, len(text) - at)
                continue
            if end == len(text) and (more := stream.read(_READ)):  # a number may go on
                text, at = text[at:] + more, 0
                continue
            place = "bare" if place == "start" else place
            yield value
            at = end


def _json_lines(path: Path) -> Iterator[Any]:
    with _text_stream(path) as stream:
        for number, line in enumerate(_lines(stream), 1):
            if line.strip():
                try:
                    yield json.loads(line)
                except json.JSONDecodeError as error:
                    raise ValueError(f"line {number} is no JSON: {error.msg}") from None


def _json_reader(values: Callable[[Path], Iterator[Any]]) -> Reader:
    def structs(path: Path, type_: pa.DataType | None) -> Iterator[pa.RecordBatch]:
        first = 1
        for rows in _in_batches(values(path)):
            for number, row in enumerate(rows, first):
                if not isinstance(row, dict):
                    raise ValueError(f"row {number} is no object but {type(row).__name__}")
            try:
                yield pa.RecordBatch.from_struct_array(pa.array(rows, type=type_))
            except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
                place = f"rows {first} to {first + len(rows) - 1}"
                raise ValueError(f"{place} do not have one type a column: {error}") from None
            first += len(rows)

    def schema_of(path: Path) -> pa.Schema:
        schema = pa.schema([])
        for batch in structs(path, None):
            try:
                schema = pa.unify_schemas([schema, batch.schema], promote_options="permissive")
            except pa.ArrowTypeError as error:
                raise ValueError(f"rows do not have one type a column: {error}") from None
        if not schema.names:
            raise ValueError("no rows, so no columns")
        return schema

    def rows(path: Path, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        yield from structs(path, pa.struct(list(schema)))

    return schema_of, rows


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
    with _text_stream(path) as stream:
        for lines in _in_batches(_lines(stream)):
            yield pa.record_batch([pa.array(lines, pa.string())], schema=schema)


def _open_arrow(path: Path) -> Iterator[pa.RecordBatch | pa.Schema]:
    """First the schema, then the batches, of either IPC format."""
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
    return pq.read_schema(path).remove_metadata()


def _parquet_rows(path: Path, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=ROWS):
            yield from pa.Table.from_batches([batch]).select(schema.names).cast(schema).to_batches()


READERS: dict[str, Reader] = {
    "json": _json_reader(_json_values),
    "jsonl": _json_reader(_json_lines),
    "text": (_text_schema, _text_rows),
    "arrow": (_arrow_schema, _arrow_rows),
    "parquet": (_parquet_schema, _parquet_rows),
}
