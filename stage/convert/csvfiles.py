"""CSV files as streams of batches: the type of a column is the narrowest that holds every value of every file.

The header is looked at before anything is parsed: a file with another separator is one odd column to a parser.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as csv

CSV_BLOCK = 16 * 2**20  # bytes; a row must fit in one
_HEADER = 1 << 20  # bytes that are looked at for the first line

# (schema of a file, its batches under a schema)
Reader = tuple[Callable[[Path], pa.Schema], Callable[[Path, pa.Schema], Iterator[pa.RecordBatch]]]


class NotCommas(ValueError):
    """A CSV that its separator does not cut into columns."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(problem)
        self.remedy = remedy


def csv_reader(separator: str | None) -> Reader:
    """How to read CSV files; `separator` None: cut at commas, `.tsv` at tabs."""

    def schema_of(path: Path) -> pa.Schema:
        return _csv_schema(path, separator)

    def rows(path: Path, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        return _csv_rows(path, schema, separator)

    return schema_of, rows


def _open_csv(path: Path, options: csv.ConvertOptions, separator: str | None) -> csv.CSVStreamingReader:
    delimiter = separator or ("\t" if ".tsv" in path.suffixes else ",")
    return csv.open_csv(
        pa.input_stream(str(path), compression="detect"),
        read_options=csv.ReadOptions(use_threads=False, block_size=CSV_BLOCK),
        parse_options=csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
        convert_options=options,
    )


def check_header(path: Path, separator: str | None) -> None:
    """Looks at the first line alone.

    Raises:
        NotCommas: it would be several columns with another separator than the one that is going to be used.
    """
    header = _first_line(path)
    if separator is None and "," not in header and ".tsv" not in path.suffixes:
        _refuse_other_separator(header)


def _csv_names(path: Path, separator: str | None) -> list[str]:
    check_header(path, separator)
    try:
        with _open_csv(path, csv.ConvertOptions(), separator) as reader:
            names = list(reader.schema.names)
    except pa.ArrowInvalid as error:
        if "Expected 1 columns" not in str(error):
            raise
        raise NotCommas(
            f"its first line is one column, and others are more: {error}",
            "A CSV begins with a line of names. Is it plain text, a row a line? Then: convert: text",
        ) from None
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ValueError(f"two columns are called {sorted(twice)[0]!r}.")
    return names


def _first_line(path: Path) -> str:
    """What may be the names of the columns; of a very long line the beginning."""
    head: bytes = pa.input_stream(str(path), compression="detect").read(_HEADER)
    return (head.decode("utf-8", "replace").removeprefix("\ufeff").splitlines() or [""])[0]


def _refuse_other_separator(header: str) -> None:
    """One column whose name would be several with another separator: pyarrow reads such a file without a word."""
    for separator in (";", "\t", "|"):
        if separator in header:
            columns = [column.strip('"') for column in header.split(separator)]
            raise NotCommas(
                f"its header has no comma, and would be one column; cut at {separator!r} it is {len(columns)}: "
                f"{', '.join(columns[:4])}{', ...' if len(columns) > 4 else ''}.",
                f"Say so in its entry: separator: {json.dumps(separator)}",
            )


def merged_csv(one: pa.Schema, other: pa.Schema) -> pa.Schema:
    """The schema of two files together. Columns that they do not agree on are text: everything in a CSV is.

    Raises:
        ValueError: they do not have the same columns.
    """
    if set(one.names) != set(other.names):
        raise ValueError(f"it has the columns {', '.join(other.names)}; the files before it {', '.join(one.names)}.")
    fields = []
    for field in one:
        try:
            pair = [pa.schema([field]), pa.schema([other.field(field.name)])]
            fields.append(pa.unify_schemas(pair, promote_options="permissive").field(0))
        except pa.ArrowTypeError:
            fields.append(pa.field(field.name, pa.string()))
    return pa.schema(fields)


def _csv_schema(path: Path, separator: str | None) -> pa.Schema:
    """The narrowest of int64, float64, bool and text that holds every value of a column."""
    names = _csv_names(path, separator)
    as_text = csv.ConvertOptions(column_types={n: pa.string() for n in names}, strings_can_be_null=True)
    candidates = {name: [pa.int64(), pa.float64(), pa.bool_()] for name in names}
    is_empty = dict.fromkeys(names, True)
    with _open_csv(path, as_text, separator) as reader:
        for batch in reader:
            for name in names:
                column = batch.column(name).drop_null()
                if len(column):
                    is_empty[name] = False
                    candidates[name] = [type_ for type_ in candidates[name] if _holds(type_, column)]
    types = {n: pa.null() if is_empty[n] else next(iter(candidates[n]), pa.string()) for n in names}
    return pa.schema([pa.field(name, types[name]) for name in names])


def _holds(type_: pa.DataType, column: pa.StringArray) -> bool:
    """Whether a type keeps every value. `007` and 20-digit numbers are text: as numbers they would lose something."""
    if not pa.types.is_boolean(type_):
        loses = r"^\s*[+-]?0[0-9]|^\s*\+" if pa.types.is_integer(type_) else r"^\s*[+-]?0[0-9]|^\s*\+|[0-9]{16}"
        if pc.any(pc.match_substring_regex(column, loses)).as_py():
            return False
        if pc.any(pc.match_substring_regex(column, r"[xX]")).as_py():
            return False
    elif not pc.all(pc.is_in(pc.utf8_lower(column), pa.array(["true", "false"]))).as_py():
        return False
    try:
        column.cast(type_)
    except pa.ArrowInvalid:
        return False
    return True


def _csv_rows(path: Path, schema: pa.Schema, separator: str | None) -> Iterator[pa.RecordBatch]:
    options = csv.ConvertOptions(
        column_types={field.name: field.type for field in schema}, include_columns=schema.names
    )
    with _open_csv(path, options, separator) as reader:
        for batch in reader:
            yield batch.select(schema.names)
