"""JSON files as batches of rows: one array of objects, or objects one by one (JSON lines)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.compute as pc

from stage.convert.text_files import MAX_LINE, NotReadable, check_text, open_text
from stage.files import human_size
from stage.lock.document import Ambiguous, each_key_once, held

_ROWS = 5_000  # per batch
_READ = 1 << 20
_SPACE = re.compile(r"[ \t\r\n]*")
_LONGEST_WORD = 20  # of JSON that a cut can spoil: `false`, `\ud83d\ude00`
# What pyarrow, and so `load_dataset`, reads as a date.
_DATE = r"^\d{4}-\d{2}-\d{2}([ T]\d{2}(:?\d{2}(:?\d{2})?)?(Z|[+-]\d{2}(:?\d{2})?)?)?$"
_ONE_TYPE = "Write the values of a column in one type. A string can hold anything."


class JsonReader:
    """Reads JSON files. A column has the type that holds its values in all files."""

    def __init__(self) -> None:
        self._files: dict[str, Path] = {}
        self._schema = pa.schema([])
        self._first_date: dict[str, str] = {}  # column of texts that are all dates -> the first
        self._no_dates: set[str] = set()

    def add(self, name: str, path: Path) -> pa.Schema:
        """Reads a file for the first time; returns the columns of all files so far.

        Raises:
            NotReadable: not JSON, not objects, or a column with values of several types.
        """
        check_text(path, has_lines=False)
        self._files[name] = path
        for batch in self._batches(path, None):
            self._note_dates(batch)
        if not self._schema.names:
            raise NotReadable("no rows, so no columns", "Get the file again.")
        return self._schema

    def rows(self, path: Path, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """The rows of a file that was read before, with the types of `schema`."""
        yield from self._batches(path, pa.struct(list(schema)))

    def notes(self) -> Iterator[str]:
        """What would be otherwise with `load_dataset`."""
        for column, first in self._first_date.items():
            yield f"`{column}` is text, as written: {first!r}; `load_dataset` would read dates"

    def _batches(self, path: Path, type_: pa.DataType | None) -> Iterator[pa.RecordBatch]:
        values = (value for _, value in _values(path))
        while rows := list(islice(values, _ROWS)):
            try:
                array = pa.array(rows, type=type_)
                batch = pa.RecordBatch.from_struct_array(array)
                if type_ is None:
                    _check_truth(rows, array.type)
                    self._schema = pa.unify_schemas(
                        [self._schema, batch.schema], promote_options="permissive"
                    )
            except (pa.ArrowException, OverflowError, UnicodeEncodeError) as error:
                raise _conflict(self._files, error) from None
            yield batch

    def _note_dates(self, batch: pa.RecordBatch) -> None:
        for name, cells in zip(batch.schema.names, batch.columns, strict=True):
            if not pa.types.is_string(cells.type) or name in self._no_dates:
                continue
            texts = cells.drop_null()
            if not pc.all(pc.match_substring_regex(texts, _DATE)).as_py():
                self._no_dates.add(name)
                self._first_date.pop(name, None)
            elif len(texts):
                self._first_date.setdefault(name, texts[0].as_py())


def _check_truth(values: list[Any], type_: pa.DataType) -> None:
    """Raises where pyarrow converted a true to 1.0, as in a column that begins with a fraction."""
    if pa.types.is_floating(type_) and any(value is True or value is False for value in values):
        raise pa.ArrowInvalid("true or false among fractions")
    if pa.types.is_struct(type_):
        there = [value for value in values if value is not None]
        for part in type_:
            _check_truth([value.get(part.name) for value in there], part.type)
    if pa.types.is_list(type_):
        _check_truth([item for value in values for item in value or ()], type_.value_type)


_WHOLE, _FRACTION = "a whole number", "a fraction"
_ROUNDED = "a whole number that the type of fractions rounds"
_TOO_LONG = "a whole number that does not fit 64 bits"
_HALF = "a text with half of a character"
_TOGETHER = ({_WHOLE, _FRACTION}, {_WHOLE, _ROUNDED})


def _conflict(files: dict[str, Path], error: Exception) -> NotReadable:
    """Reads files again whose values have no common type, for the two lines that differ."""
    first: dict[str, dict[str, str]] = {}  # place of a value -> kind -> where it is first
    for name, path in files.items():
        for line, row in _values(path):
            for place, kind, value in _kinds("", row):
                where = (
                    f"{kind} in {name}, line {line} ({json.dumps(value, ensure_ascii=False)[:40]})"
                )
                if kind in (_TOO_LONG, _HALF):
                    remedy = _ONE_TYPE if kind == _TOO_LONG else None
                    return NotReadable(f"`{place}` is {where}", remedy)
                before = first.setdefault(place, {})
                for other in before.keys() - {kind}:
                    if {kind, other} not in _TOGETHER:
                        return NotReadable(f"`{place}` is {before[other]} and {where}", _ONE_TYPE)
                before.setdefault(kind, where)
    return NotReadable(f"the rows do not have one type per column: {error}", _ONE_TYPE)


def _kinds(place: str, value: Any) -> Iterator[tuple[str, str, Any]]:
    """The place (`messages[].role`), the kind and the value of everything in a value."""
    if isinstance(value, dict):
        yield place, "an object", value
        for key, item in value.items():
            yield from _kinds(f"{place}.{key}" if place else key, item)
    elif isinstance(value, list):
        yield place, "a list", value
        for item in value:
            yield from _kinds(f"{place}[]", item)
    elif isinstance(value, str):
        is_whole = not any("\ud800" <= character <= "\udfff" for character in value)
        yield place, "text" if is_whole else _HALF, value
    elif isinstance(value, bool):
        yield place, "true or false", value
    elif isinstance(value, int):
        fits = -(2**63) <= value < 2**63
        kind = _TOO_LONG if not fits else _ROUNDED if abs(value) > 2**53 else _WHOLE
        yield place, kind, value
    elif value is not None:
        yield place, _FRACTION, value


def _values(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a file, each with its line. The file is never whole in memory.

    Raises:
        NotReadable: not JSON, or values that are no objects.
    """
    with open_text(path, newline=None) as stream:
        text = _Text(stream)
        has_array = text.mark() == "["
        for line, value in _of_array(text) if has_array else _one_by_one(text):
            if not isinstance(value, dict):
                _, kind, _ = next(_kinds("", value), ("", "null", None))
                raise NotReadable(
                    f"line {line}: a row is not an object but {kind}",
                    'Write each row as an object: {"column": value}',
                )
            yield line, value


def _one_by_one(text: _Text) -> Iterator[tuple[int, Any]]:
    while mark := text.mark():
        if mark == ",":
            raise NotReadable(
                f"line {text.line}: after an object comes a comma",
                "Write one object a line, without commas between them, or all in one array: [...]",
            )
        yield text.line, text.value()


def _of_array(text: _Text) -> Iterator[tuple[int, Any]]:
    text.skip()
    is_first = True
    while not (is_first and text.mark() == "]"):
        text.mark()
        yield text.line, text.value()
        if (mark := text.mark()) == "]":
            break
        if mark != ",":
            between = f"between two values of an array is no comma: {text.rest()!r}"
            problem = between if mark else "not JSON: the array does not end"
            raise NotReadable(f"line {text.line}: {problem}")
        text.skip()
        is_first = False
    text.skip()
    if (mark := text.mark()) == "[":
        raise NotReadable(
            f"line {text.line}: a second array begins: are the arrays rows, or parts of one table?",
            'Where each array is one row, write it as {"messages": [...]}. Where they are pages of '
            "rows, make one array of them: jq -s add FILE > NEW",
        )
    if mark:
        raise NotReadable(f"line {text.line}: after the end of an array comes {text.rest()!r}")


class _Text:
    """JSON text, read in pieces."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream, self._text, self._at = stream, "", 0
        self.line = 1

    def mark(self) -> str:
        """The next character that is no space; empty at the end."""
        while True:
            space = _SPACE.match(self._text, self._at)
            assert space is not None
            self._pass(space.end())
            if self._at < len(self._text) or not self._read():
                return self._text[self._at : self._at + 1]

    def skip(self) -> None:
        """Passes that character."""
        self._at += 1

    def rest(self) -> str:
        """What comes next, for a message."""
        return self._text[self._at : self._at + 20]

    def value(self) -> Any:
        """The value that begins here."""
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                is_cut = (
                    error.msg.startswith("Unterminated")
                    or error.pos > len(self._text) - _LONGEST_WORD
                )
                if len(self._text) - self._at > MAX_LINE:
                    problem = f"one value of more than {human_size(MAX_LINE)}"
                elif is_cut and self._read():
                    continue
                elif error.pos >= len(self._text):
                    problem = "it does not end"
                else:
                    self._pass(error.pos)
                    problem = error.msg
                raise NotReadable(f"line {self.line}: not JSON: {problem}") from None
            except Ambiguous as error:
                raise NotReadable(f"the object that begins in line {self.line}: {error}") from None
            if end < len(self._text) or not self._read():  # a number may continue
                self._pass(end)
                return value

    def _pass(self, end: int) -> None:
        self.line += self._text.count("\n", self._at, end)
        self._at = end

    def _read(self) -> bool:
        more = self._stream.read(max(_READ, len(self._text) - self._at))
        self._text, self._at = self._text[self._at :] + more, 0
        return bool(more)


_DECODER = json.JSONDecoder(object_pairs_hook=each_key_once, parse_float=held)
