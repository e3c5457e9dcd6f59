"""CSV files as batches of rows.

Python's `csv` cuts the cells. They wait as text in a compressed temporary file until all cells of
all files are known; then each column gets the narrowest type that keeps every cell.

A cell is a whole number if it is written as one (`0`, `-17`; not `007`, `+1`, `1_000`, `0x1F`) and
fits 64 bits. It is a fraction if it is a decimal number, with or without an exponent, that float64
keeps (`keeps`). So a float64 printed by pandas, numpy or R becomes float64, and an id of 20 digits
or a price of 25 digits stays text. A single cell that is neither makes its column text.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.ipc as ipc

from stage.convert.parquet_writer import joined
from stage.convert.text_files import (
    MAX_LINE,
    NotReadable,
    check_lines,
    check_start,
    check_text,
    open_bytes,
    open_text,
)
from stage.files import human_count

_CELLS = 4_000  # that are objects of Python at a time: more make its garbage collector slow
_BATCH_ROWS, _BATCH_BYTES = 10_000, 8 * 2**20  # at most
_HEADER = 1 << 20  # bytes in which the first line is searched
_SHOWN_ROWS = 3
_EXCEL_LINE = re.compile(r'"?sep=.?"?', re.IGNORECASE)

# Cells that mean "no value" in columns of numbers and of true/false: those of pandas.read_csv
# (pandas 2).
_WORDS = (
    "|#N/A|#N/A N/A|#NA|-1.#IND|-1.#QNAN|-NaN|-nan|1.#IND|1.#QNAN|<NA>|N/A|NA|NULL|NaN|None|n/a|"
    "nan|null"
)
_NO_VALUE = pa.array(_WORDS.split("|"))
_LONGEST_WORD = max(map(len, _WORDS.split("|")))
_TRUE = pa.array(["true", "True", "TRUE"])  # as in pandas
_TRUTHS = pa.array(["true", "True", "TRUE", "false", "False", "FALSE"])
_WHOLE = r"^[ \t]*(0|-?[1-9][0-9]{0,18})[ \t]*$"
_DECIMAL = r"^[ \t]*-?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?[ \t]*$"
_INFINITE = r"^[ \t]*-?(inf|Inf|INF|infinity|Infinity)[ \t]*$"
# What pandas reads as a number: also `007` and `+1`, and up to about 64 bits without a sign.
_PANDAS = (
    r"^[ \t]*[+-]?((0*[0-9]{1,19}|1[0-7][0-9]{18}|[0-9]*\.[0-9]+|[0-9]+\.)([eE][+-]?[0-9]+)?"
    r"|inf|Inf|INF|infinity|Infinity)[ \t]*$"
)
# 16 digits, or an exponent of 3 digits: float64 keeps all other numbers (DBL_DIG is 15).
_LONG = r"[0-9](\.?[0-9]){15}|[eE][+-]?[0-9]{3}"
_MOST_DIGITS = 767  # of a float64 with all its decimal digits


def keeps(number: str) -> bool:
    """Whether float64 keeps a decimal number.

    The float64 must print as the same number: either with the same count of digits, as for a number
    that a program printed (`%.17g`, `%.18e`), or with the fewest digits, as for a number with zeros
    at the end. A whole number without point and exponent must also fit 64 bits: it may be an id.
    """
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


def check_header(path: Path, separator: str | None, or_omit: str = "") -> None:
    """Checks the encoding and the separator by the beginning of a file.

    Args:
        or_omit: how the entry can omit the file, for the remedy of an empty one.

    Raises:
        NotReadable: it is no text or not UTF-8, it is empty, it begins with a line for Excel, or
            its header has no comma but another separator.
    """
    with open_bytes(path) as stream:
        head = stream.read(_HEADER)
    check_start(head)
    check_lines(head)
    header = _first_line(path)
    if not header:
        raise NotReadable(
            "it is empty: a CSV begins with a line of names.", f"Get it again{or_omit}."
        )
    if _EXCEL_LINE.fullmatch(header):
        raise NotReadable(
            f"its first line, {header!r}, is a word to Excel, not the names of the columns.",
            "Remove that line: tail -n +2 FILE > NEW",
        )
    if separator is None and (other := other_separator(path)):
        columns = [column.strip('"') for column in header.split(other)]
        raise NotReadable(
            f"its header has no comma, and would be one column; "
            f"cut at {other!r} it is {len(columns)}: "
            f"{', '.join(columns[:4])}{', ...' if len(columns) > 4 else ''}.",
            f"Add to its entry: separator: {json.dumps(other, ensure_ascii=False)}",
        )


def other_separator(path: Path) -> str | None:
    """What would cut a header into columns that has no comma; as it is, it would be one column."""
    header = _first_line(path)
    if "," in header or ".tsv" in path.name.lower():
        return None
    return next((separator for separator in (";", "\t", "|") if separator in header), None)


def _first_line(path: Path) -> str:
    """The first line that is not blank, with the names of the columns; at most 1 MiB of it."""
    with open_bytes(path) as stream:
        head = stream.read(_HEADER)
    text = head.decode("utf-8", "replace").removeprefix("\ufeff").lstrip("\r\n")
    return (text.splitlines() or [""])[0]


class CsvReader:
    """Reads CSV files of the same columns.

    Args:
        separator: between the cells; None: commas, and tabs in `.tsv` files.
        scratch: a folder for the cells.
    """

    def __init__(self, separator: str | None, scratch: Path) -> None:
        self._separator, self._scratch = separator, scratch
        self._cells: dict[Path, Path] = {}  # CSV file -> Arrow file with its cells
        self._columns: dict[str, _ColumnTypes] = {}

    def add(self, name: str, path: Path) -> pa.Schema:
        """Reads a file for the first time; returns the columns of all files so far.

        Raises:
            NotReadable: another encoding, a NUL byte, a wrong quote, another separator, no header,
                or rows with more or fewer cells than it.
            ValueError: two columns have one name, or other columns than the files before.
        """
        check_header(path, self._separator)
        check_text(path)
        csv.field_size_limit(MAX_LINE)
        separator = self._separator or ("\t" if ".tsv" in path.name.lower() else ",")
        with open_text(path, newline="") as text:
            rows = csv.reader(text, delimiter=separator, strict=True)
            try:
                self._take(path, filter(None, rows))
            except (csv.Error, _OtherLength):
                raise _wrong_rows(path, separator) from None
        columns = self._columns.items()
        return pa.schema([pa.field(name, column.type()) for name, column in columns])

    def _take(self, path: Path, rows: Iterator[list[str]]) -> None:
        names = next(rows)
        if twice := sorted(name for name in set(names) if names.count(name) > 1):
            raise ValueError(f"two columns are called {twice[0]!r}.")
        if self._columns and set(names) != set(self._columns):
            have, had = ", ".join(names), ", ".join(self._columns)
            raise ValueError(f"it has the columns {have}; the files before it {had}.")
        self._columns = self._columns or {name: _ColumnTypes() for name in names}
        schema = pa.schema([pa.field(name, pa.string()) for name in names])
        self._cells[path] = self._scratch / f"{len(self._cells)}.arrow"
        options = ipc.IpcWriteOptions(compression="lz4")
        with ipc.new_file(str(self._cells[path]), schema, options=options) as sink:
            for table in joined(schema, _cut(rows, schema), _BATCH_ROWS, _BATCH_BYTES):
                cells = table.combine_chunks()
                sink.write_table(cells)
                for name, column in self._columns.items():
                    column.add(cells.column(name).chunk(0))

    def rows(self, path: Path, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """The rows of a file that was read before, with the types of `schema`."""
        with pa.OSFile(str(self._cells[path])) as source, ipc.open_file(source) as cells:
            for index in range(cells.num_record_batches):
                batch = cells.get_batch(index)
                columns = [self._typed(batch.column(field.name), field) for field in schema]
                yield pa.record_batch(columns, schema=schema)

    def _typed(self, cells: pa.StringArray, field: pa.Field) -> pa.Array:
        if field.type == pa.string():
            return cells
        if self._columns[field.name].no_value is not None:
            nothing = pa.scalar(None, pa.string())
            cells = pc.if_else(pc.is_in(cells, _NO_VALUE), nothing, cells)
        if field.type == pa.bool_():
            return pc.if_else(
                pc.is_null(cells), pa.scalar(None, pa.bool_()), pc.is_in(cells, _TRUE)
            )
        return pc.utf8_trim(cells, " \t").cast(field.type)

    def notes(self) -> Iterator[str]:
        """What would be otherwise with `load_dataset`, and why columns of numbers are text."""
        for number, (name, column) in enumerate(self._columns.items()):
            if not name:
                yield f"a column has no name; `load_dataset` would call it `Unnamed: {number}`"
            if note := column.note():
                yield f"`{name}` {note}"


class _OtherLength(Exception):
    """A row has another number of cells than the header."""


def _cut(rows: Iterator[list[str]], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Rows as columns of text, so many at a time as are fast and fit in memory."""
    most = count = _CELLS // len(schema) + 20
    while cut := list(islice(rows, count)):
        if set(map(len, cut)) != {len(schema)}:
            raise _OtherLength
        columns = [pa.array(column, pa.string()) for column in zip(*cut, strict=True)]
        batch = pa.record_batch(columns, schema=schema)
        count = min(most, 1 + len(cut) * _BATCH_BYTES // batch.nbytes)
        yield batch


def _wrong_rows(path: Path, separator: str) -> NotReadable:
    """Reads a file again that cannot be cut, for the lines of what is wrong."""
    header: list[str] = []
    wrong: list[str] = []
    before, only_trailing, only_header = 0, True, True  # the last line of the row before
    with open_text(path, newline="") as text:
        rows = csv.reader(text, delimiter=separator, strict=True)
        try:
            for row in rows:
                header = header or row
                if row and len(row) != len(header):
                    shown = separator.join(row)[:40]
                    wrong.append(f"line {before + 1} has {len(row)}: {shown!r}")
                    only_trailing = only_trailing and row[len(header) :] == [""]
                    only_header = only_header and set(header[len(row) :]) == {""}
                before = rows.line_num
        except csv.Error as error:
            return _wrong_quote(before + 1, rows.line_num, str(error))
    more = f"; and {human_count(len(wrong) - _SHOWN_ROWS, 'more row')}"
    return NotReadable(
        f"the header has {human_count(len(header), 'cell')}, but {'; '.join(wrong[:_SHOWN_ROWS])}"
        f"{more if len(wrong) > _SHOWN_ROWS else ''}.",
        "A CSV begins with a line of names. For plain text, a row per line: convert: text"
        if len(header) == 1
        else f"These lines end with {separator!r}: remove it there, or add it to the header."
        if only_trailing
        else f"The header ends with {separator!r}: remove it there."
        if only_header
        else 'Correct these rows. A cell with a separator in it needs quotes: "a, b"',
    )


def _wrong_quote(begins: int, reached: int, error: str) -> NotReadable:
    """The error for quotes that RFC 4180 does not allow: many parsers join rows there."""
    doubled = 'A quote inside a quoted cell is written twice (""), not as \\".'
    if "end of data" in error or "field larger" in error:
        return NotReadable(
            f"the row that begins in line {begins} has a quote that is never closed: "
            f"it contains the rest of the file, to line {reached}.",
            f"Close the quote in line {begins}. {doubled}",
        )
    place = f"line {begins}" if begins == reached else f"lines {begins} to {reached}"
    return NotReadable(
        f"{place}: a quoted cell continues after the quote that ends it ({error}).", doubled
    )


@dataclass
class _ColumnTypes:
    """The types that fit a column, by its cells in all files so far.

    Attributes:
        has_values: a cell has a value.
        has_digits: a cell has a digit, unlike `inf`.
        no_value: the first cell that would mean "no value" among numbers.
        no_number: the first cell that neither int64 nor float64 keeps.
        begins_with_numbers: cells before that were numbers.
        pandas_numbers: pandas reads all cells as numbers.
    """

    has_values: bool = False
    has_digits: bool = False
    whole: bool = True
    fraction: bool = True
    boolean: bool = True
    no_value: str | None = None
    no_number: str | None = None
    begins_with_numbers: bool = False
    pandas_numbers: bool = True

    def add(self, cells: pa.StringArray) -> None:
        """Adds the cells of a batch."""
        if pc.min(pc.binary_length(cells)).as_py() <= _LONGEST_WORD:
            is_no_value = pc.is_in(cells, _NO_VALUE)
            if self.no_value is None and pc.any(is_no_value).as_py():
                self.no_value = cells.filter(is_no_value)[0].as_py()
            cells = cells.filter(pc.invert(is_no_value))
        if len(cells) == 0:
            return
        self.has_values = True
        wholes = _whole_numbers(cells) if self.whole else None
        self.whole = wholes is not None
        if self.fraction and not (wholes and wholes["max"] <= 2**53 and wholes["min"] >= -(2**53)):
            lost = _not_kept(cells)
            self.fraction, self.no_number = lost is None, lost
            self.begins_with_numbers = self.has_digits or cells[0].as_py() != lost
        if not self.fraction:
            self.pandas_numbers = self.pandas_numbers and _all_match(cells, _PANDAS)
        self.boolean = self.boolean and pc.all(pc.is_in(cells, _TRUTHS)).as_py()
        if not self.has_digits:
            self.has_digits = pc.any(pc.match_substring_regex(cells, "[0-9]")).as_py()

    def type(self) -> pa.DataType:
        """The narrowest type."""
        if self.has_values and self.whole:
            return pa.int64()
        if self.has_values and self.fraction and self.has_digits:
            return pa.float64()
        return pa.bool_() if self.has_values and self.boolean else pa.string()

    def note(self) -> str | None:
        """What users should know about the type; None: nothing."""
        type_, missing = self.type(), f"{self.no_value!r}"
        if type_ == pa.int64() and self.no_value is not None:
            return f"is whole numbers, null for {missing}; `load_dataset` would read fractions"
        if type_ != pa.string():
            return None
        if self.has_values and self.pandas_numbers:
            shown = "as written" if self.no_number is None else f"as written: {self.no_number!r}"
            return f"is text, {shown}; `load_dataset` would read numbers"
        if self.no_number is not None and self.begins_with_numbers:
            return f"is text: {self.no_number[:60]!r} is no number that int64 or float64 keeps"
        if self.no_value is not None:
            return f"is text, also {missing}; `load_dataset` would read null there"
        return None


def _all_match(cells: pa.StringArray, pattern: str) -> bool:
    return bool(pc.all(pc.match_substring_regex(cells, pattern)).as_py())


def _whole_numbers(cells: pa.StringArray) -> dict[str, int] | None:
    """The smallest (`min`) and largest (`max`); None if not all fit int64."""
    try:
        numbers = pc.utf8_trim(cells, " \t").cast(pa.int64()) if _all_match(cells, _WHOLE) else None
    except pa.ArrowInvalid:
        return None
    return None if numbers is None else pc.min_max(numbers).as_py()


def _not_kept(cells: pa.StringArray) -> str | None:
    """The first cell that is not a number that float64 keeps; None if there is none."""
    others = cells.filter(pc.invert(pc.match_substring_regex(cells, _DECIMAL)))
    others = others.filter(pc.invert(pc.match_substring_regex(others, _INFINITE)))
    if len(others):
        return str(others[0].as_py())
    long = pc.utf8_trim(cells.filter(pc.match_substring_regex(cells, _LONG)), " \t")
    fewest = long.cast(pa.float64()).cast(pa.string())  # most numbers are written so
    for number in pc.unique(long.filter(pc.not_equal(long, fewest))).to_pylist():
        if not keeps(number):
            return str(number)
    return None
