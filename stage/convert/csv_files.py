"""CSV files as streams of batches.

The type of a column is the narrowest that keeps every value of every file. The header is checked
before anything is parsed: a file with another separator would parse as a single column.

A cell is a whole number if it is written as one (`0`, `-17`; not `007`, `+1`, `1_000`, `0x1F`) and
fits 64 bits. It is a fraction if it is a decimal number, with or without an exponent, that float64
keeps (`keeps`). So a float64 printed by pandas, numpy or R becomes float64, and an id of 20 digits
or a price of 25 digits stays text. A single cell that is neither makes its column text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as csv

from stage.convert.plain_text import NotReadable, check_quotes, check_start, check_text, open_bytes
from stage.files import human_count, human_size

CSV_BLOCK = 16 * 2**20  # bytes that are parsed at a time
_HEADER = 1 << 20  # bytes in which the first line is searched
_SHOWN_ROWS = 3

# Cells that mean "no value" in columns of numbers and of true/false: those of pandas.read_csv
# (pandas 2).
_NULLS = [
    "",
    "#N/A",
    "#N/A N/A",
    "#NA",
    "-1.#IND",
    "-1.#QNAN",
    "-NaN",
    "-nan",
    "1.#IND",
    "1.#QNAN",
    "<NA>",
    "N/A",
]
_NULLS += ["NA", "NULL", "NaN", "None", "n/a", "nan", "null"]
_TRUE, _FALSE = ["true", "True", "TRUE"], ["false", "False", "FALSE"]  # as in pandas
_WHOLE = r"^[ \t]*(0|-?[1-9][0-9]{0,18})[ \t]*$"
_DECIMAL = r"^[ \t]*-?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?[ \t]*$"
_INFINITE = r"^[ \t]*-?(inf|Inf|INF|infinity|Infinity)[ \t]*$"
# 16 digits, or an exponent of 3 digits: float64 keeps all other numbers (DBL_DIG is 15).
_LONG = r"[0-9](\.?[0-9]){15}|[eE][+-]?[0-9]{3}"
_MOST_DIGITS = 767  # of a float64 with all its decimal digits


def keeps(number: str) -> bool:
    """Whether float64 keeps a decimal number.

    The float64 must print as the same number: either with the same count of digits, as for a number
    that a program printed (`%.17g`, `%.18e`), or with the fewest digits, as for a number with zeros
    at the end. A whole number without point and exponent must also fit 64 bits: it may be an id.
    """
    number = number.strip(" \t")
    mantissa, exponent, _ = number.partition("e")
    places = len(mantissa.partition(".")[2])
    if places and places < _MOST_DIGITS and f"{float(number):.{places}{exponent or 'f'}}" == number:
        return True  # the usual case, ten times as fast as the code below
    value = Decimal(number)
    digits = len(value.as_tuple().digits)
    if digits > _MOST_DIGITS or (
        number.lstrip("-").isdigit() and not -(2**63) <= int(number) < 2**63
    ):
        return False
    nearest = float(number)
    return Decimal(repr(nearest)) == value or Decimal(f"{nearest:.{digits - 1}e}") == value


class CsvFile:
    """One way to read CSV files; `separator` None: commas, and tabs in `.tsv` files."""

    def __init__(self, separator: str | None) -> None:
        self.separator = separator

    def rows(self, path: Path, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """The rows, with a schema of `CsvColumns`."""
        options = csv.ConvertOptions(
            column_types={field.name: field.type for field in schema},
            include_columns=schema.names,
            null_values=_NULLS,
            true_values=_TRUE,
            false_values=_FALSE,
        )
        with self._open(path, options, _WrongRows()) as reader:
            for batch in reader:
                yield batch.select(schema.names)

    def texts(self, path: Path, names: list[str]) -> Iterator[pa.RecordBatch]:
        """The rows as text; cells that mean "no value" are null.

        Raises:
            NotReadable: rows with more or fewer cells than the header; a row that is too long.
        """
        wrong = _WrongRows()
        options = csv.ConvertOptions(
            column_types={n: pa.string() for n in names},
            strings_can_be_null=True,
            null_values=_NULLS,
        )
        try:
            with self._open(path, options, wrong) as reader:
                yield from reader
        except pa.ArrowInvalid as error:
            if "straddl" not in str(error) and "block size" not in str(error):
                raise
            raise NotReadable(
                f"a row is longer than {human_size(CSV_BLOCK)}.",
                "Is a quote at its beginning never closed?",
            ) from None
        wrong.check()

    def names(self, path: Path) -> list[str]:
        """Checks a file, and returns the names of its columns.

        Raises:
            NotReadable: another encoding, a NUL byte, a wrong quote, another separator, or no
                header.
            ValueError: two columns have one name.
        """
        check_header(path, self.separator)
        if check_text(path):
            check_quotes(path, self._delimiter(path))
        with self._open(path, csv.ConvertOptions(), _WrongRows()) as reader:
            names = list(reader.schema.names)
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            raise ValueError(f"two columns are called {sorted(twice)[0]!r}.")
        return names

    def _delimiter(self, path: Path) -> str:
        return self.separator or ("\t" if ".tsv" in path.suffixes else ",")

    def _open(
        self, path: Path, options: csv.ConvertOptions, wrong: _WrongRows
    ) -> csv.CSVStreamingReader:
        return csv.open_csv(
            pa.input_stream(str(path), compression="detect"),
            read_options=csv.ReadOptions(use_threads=False, block_size=CSV_BLOCK),
            parse_options=csv.ParseOptions(
                delimiter=self._delimiter(path),
                newlines_in_values=True,
                invalid_row_handler=wrong.take,
            ),
            convert_options=options,
        )


class _WrongRows:
    """Collects the rows with another number of cells than the header."""

    def __init__(self) -> None:
        self._first: list[csv.InvalidRow] = []
        self._count = 0

    def take(self, row: csv.InvalidRow) -> str:
        """Adds a row. The reader omits it."""
        self._count += 1
        if self._count <= _SHOWN_ROWS:
            self._first.append(row)
        return "skip"

    def check(self) -> None:
        """Raises if there are such rows.

        Raises:
            NotReadable: names the first rows.
        """
        if not self._first:
            return
        header = human_count(self._first[0].expected_columns, "cell")
        rows = "; ".join(
            f"row {row.number} has {row.actual_columns}: {row.text[:40]!r}" for row in self._first
        )
        more = self._count - len(self._first)
        rows += f"; and {human_count(more, 'more row')}" if more else ""
        raise NotReadable(
            f"the header (row 1) has {header}, but {rows}.",
            "A CSV begins with a line of names. For plain text, a row per line: convert: text"
            if self._first[0].expected_columns == 1
            else 'Correct these rows. A cell with a separator in it needs quotes: "a, b"',
        )


def check_header(path: Path, separator: str | None, or_omit: str = "") -> None:
    """Checks the encoding and the separator by the beginning of a file.

    Args:
        or_omit: how the entry can omit the file, for the remedy of an empty one.

    Raises:
        NotReadable: it is UTF-16 or UTF-32, it is empty, or its header has no comma but another
            separator.
    """
    check_start(path)
    header = _first_line(path)
    if not header:
        raise NotReadable(
            "it is empty: a CSV begins with a line of names.", f"Get it again{or_omit}."
        )
    if separator is None and (other := other_separator(path)):
        columns = [column.strip('"') for column in header.split(other)]
        raise NotReadable(
            f"its header has no comma, and would be one column; "
            f"cut at {other!r} it is {len(columns)}: "
            f"{', '.join(columns[:4])}{', ...' if len(columns) > 4 else ''}.",
            f"Add to its entry: separator: {json.dumps(other)}",
        )


def other_separator(path: Path) -> str | None:
    """What would cut a header into columns that has no comma; pyarrow would read one column."""
    header = _first_line(path)
    if "," in header or ".tsv" in path.suffixes:
        return None
    return next((separator for separator in (";", "\t", "|") if separator in header), None)


def _first_line(path: Path) -> str:
    """The first line that is not blank, with the names of the columns; at most 1 MiB of it."""
    with open_bytes(path) as stream:
        head = stream.read(_HEADER)
    text = head.decode("utf-8", "replace").removeprefix("\ufeff").lstrip("\r\n")
    return (text.splitlines() or [""])[0]


@dataclass
class _Column:
    """The types that fit a column, by its cells in all files so far.

    Attributes:
        has_cells: a cell has a value.
        has_digits: a cell has a digit, unlike `inf`.
        no_number: the first cell that neither int64 nor float64 keeps, if cells before it were
            numbers.
    """

    has_cells: bool = False
    has_digits: bool = False
    whole: bool = True
    fraction: bool = True
    boolean: bool = True
    no_number: str | None = None

    def look_at(self, cells: pa.StringArray) -> None:
        """Adds the cells of a batch, which has no nulls."""
        if len(cells) == 0:
            return
        if self.whole:
            self.whole = _all(pc.match_substring_regex(cells, _WHOLE)) and _fits_int64(cells)
        if self.fraction:
            lost = _not_kept(cells)
            self.fraction = lost is None
            if lost is not None and (self.has_digits or cells[0].as_py() != lost):
                self.no_number = lost
        self.boolean = self.boolean and _all(pc.is_in(cells, pa.array(_TRUE + _FALSE)))
        self.has_digits = self.has_digits or bool(
            pc.any(pc.match_substring_regex(cells, "[0-9]")).as_py()
        )
        self.has_cells = True

    def type(self) -> pa.DataType:
        """The narrowest type; null where there is no cell."""
        if not self.has_cells:
            return pa.null()
        if self.whole:
            return pa.int64()
        if self.fraction and self.has_digits:
            return pa.float64()
        return pa.bool_() if self.boolean else pa.string()


@dataclass
class CsvColumns:
    """The columns of several CSV files together."""

    file: CsvFile
    columns: dict[str, _Column] = field(default_factory=dict)

    def look_at(self, path: Path) -> None:
        """Adds a file.

        Raises:
            ValueError: it cannot be read, or has other columns than the files before.
        """
        names = self.file.names(path)
        if self.columns and set(names) != set(self.columns):
            have, had = ", ".join(names), ", ".join(self.columns)
            raise ValueError(f"it has the columns {have}; the files before it {had}.")
        self.columns = self.columns or {name: _Column() for name in names}
        for batch in self.file.texts(path, names):
            for name, column in self.columns.items():
                column.look_at(batch.column(name).drop_null())

    def schema(self) -> pa.Schema:
        """Each column with the narrowest type; null where it has no value."""
        return pa.schema([pa.field(name, column.type()) for name, column in self.columns.items()])

    def notes(self) -> Iterator[str]:
        """Why columns that begin with numbers are text."""
        for name, column in self.columns.items():
            if column.no_number is not None and column.type() == pa.string():
                yield (
                    f"`{name}` is text: {column.no_number[:60]!r} is no number that int64 or "
                    "float64 keeps"
                )


def _all(mask: pa.BooleanArray) -> bool:
    return bool(pc.all(mask).as_py())


def _fits_int64(cells: pa.StringArray) -> bool:
    try:
        pc.utf8_trim(cells, " \t").cast(pa.int64())
    except pa.ArrowInvalid:
        return False
    return True


def _not_kept(cells: pa.StringArray) -> str | None:
    """The first cell that is not a number that float64 keeps; None if there is none."""
    numbers = pc.or_(
        pc.match_substring_regex(cells, _DECIMAL), pc.match_substring_regex(cells, _INFINITE)
    )
    if not _all(numbers):
        return str(cells.filter(pc.invert(numbers))[0].as_py())
    long = pc.utf8_trim(cells.filter(pc.match_substring_regex(cells, _LONG)), " \t")
    fewest = long.cast(pa.float64()).cast(pa.string())  # most numbers are written so
    for number in pc.unique(long.filter(pc.not_equal(long, fewest))).to_pylist():
        if not keeps(number):
            return str(number)
    return None
