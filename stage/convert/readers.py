"""Files of one format as batches of rows with common columns.

The types of columns come from all of the data: a first pass finds the type that holds every value,
a second pass reads with it. So row 1,000,000 cannot fail because of types found in the first rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.ipc as ipc
import pyarrow.parquet as pq

from stage.convert.csv_files import CsvReader, check_header
from stage.convert.json_files import JsonReader
from stage.convert.parquet_writer import first_unfit
from stage.convert.text_files import NotReadable, check_text, open_text, to_utf8
from stage.errors import DamageError, Mistakes, UsageError
from stage.paths import printable

HUGGINGFACE = b"huggingface"  # the key of `datasets` in the metadata of a schema
_ROWS = 10_000  # per batch


class Table:
    """The rows of files of one format, with the columns that hold all of them.

    Args:
        how: `csv`, `json`, `jsonl`, `text`, `arrow` or `parquet`.
        files: name in messages, and path, of each.
        scratch: a folder for temporary files.
        separator: between the cells of a CSV; None: as the suffixes of the files say.
        note: called with a line for each column that `load_dataset` would read otherwise, and for
            each of a CSV that begins with numbers and is text.

    Raises:
        UsageError: files cannot be read; names all.
    """

    def __init__(
        self,
        how: str,
        files: Sequence[tuple[str, Path]],
        scratch: Path,
        separator: str | None = None,
        note: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._reader = _reader(how, separator, scratch)
        schema, first_with = pa.schema([]), dict[str, str]()  # column -> the first file with it
        mistakes = Mistakes()
        for name, path in dict(files).items():  # a file may be in two splits
            with mistakes, _located(name):
                schema = self._reader.add(name, path)
                for column in schema.names:
                    first_with.setdefault(column, name)
        mistakes.check("")
        if isinstance(self._reader, CsvReader | JsonReader):
            for line in self._reader.notes():
                note(line)
        self.schema = pa.schema(map(_null_as_text, schema), metadata=schema.metadata)
        if unfit := first_unfit(self.schema):
            column, problem = unfit
            raise UsageError(
                f"{first_with[column]}: parquet cannot hold the column "
                f"{printable(column)}: {problem}.",
                "Remove it from the file, or write it as text (in JSON: as a string), "
                "then fetch again.",
            )

    def rows(self, files: Iterable[tuple[str, Path]]) -> Iterator[pa.RecordBatch]:
        """The rows of some of the files, one after the other.

        Raises:
            UsageError: a file cannot be read; names it.
            DamageError: an Arrow file is damaged.
        """
        for name, path in files:
            with _located(name):
                yield from self._reader.rows(path, self.schema)


def check_csv(name: str, path: Path, separator: str | None, or_omit: str) -> None:
    """Checks the header of a CSV, long before the conversion. `or_omit`: as for `check_header`.

    Raises:
        UsageError: it has another encoding or another separator.
    """
    with _located(name, path):
        check_header(path, separator, or_omit)


@contextmanager
def _located(name: str, path: Path | None = None) -> Iterator[None]:
    """Converts errors of readers to a `UsageError` with the file's name.

    Args:
        path: of the file, where it is the user's own; None: it may be a temporary one.
    """
    repair = "Fix that in the file, or convert it yourself and name the parquet with `path:`."
    try:
        yield
    except RecursionError:
        raise UsageError("nested too deeply.", repair, place=name) from None
    except NotReadable as error:
        command = None
        if error.encoding:
            command = to_utf8(path or Path(Path(name).name), error.encoding)
        raise UsageError(str(error), error.remedy or command or repair, place=name) from None
    except (pa.ArrowException, ValueError, OSError, TypeError, EOFError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise UsageError(" ".join(str(error).split())[:300], repair, place=name) from None


def _null_as_text(field: pa.Field) -> pa.Field:
    """A column without any value becomes a column of text."""
    return pa.field(field.name, pa.string()) if pa.types.is_null(field.type) else field


def _reader(
    how: str, separator: str | None, scratch: Path
) -> CsvReader | JsonReader | _TextReader | _ArrowReader:
    if how == "csv":
        return CsvReader(separator, scratch)
    if how in ("json", "jsonl"):
        return JsonReader()
    if how == "text":
        return _TextReader()
    return _ParquetReader() if how == "parquet" else _ArrowReader()


class _TextReader:
    def add(self, name: str, path: Path) -> pa.Schema:
        check_text(path, may_be_page=True)
        return pa.schema([pa.field("text", pa.string())])

    def rows(self, path: Path, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        with open_text(path, newline=None) as stream:
            texts = (line.removesuffix("\n") for line in stream)
            while rows := list(islice(texts, _ROWS)):
                yield pa.record_batch([pa.array(rows, pa.string())], schema=schema)


class _ArrowReader:
    def __init__(self) -> None:
        self._schema: pa.Schema | None = None

    def add(self, name: str, path: Path) -> pa.Schema:
        found = self._schema_of(path)
        before = self._schema or found
        if set(found.names) != set(before.names):
            have, had = ", ".join(found.names), ", ".join(before.names)
            raise ValueError(f"it has the columns {have}; the files before it {had}.")
        if found.metadata and before.metadata and found.metadata != before.metadata:
            raise ValueError(
                "the names of its classes, or what its columns hold, are others than in the files "
                "before it."
            )
        self._schema = pa.unify_schemas([before, found], promote_options="permissive")
        for name in self._schema.names:
            one, other = before.field(name).type, found.field(name).type
            if pa.types.is_decimal(one) != pa.types.is_decimal(other):
                raise ValueError(f"its column {name} is {other}; the files before it have {one}.")
        return self._schema

    def rows(self, path: Path, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        for batch in self._batches(path):
            table = pa.Table.from_batches([batch]).select(schema.names)
            yield from table.cast(schema).to_batches()

    def _schema_of(self, path: Path) -> pa.Schema:
        with _open_arrow(path) as (schema, _):
            return schema

    def _batches(self, path: Path) -> Iterator[pa.RecordBatch]:
        with _open_arrow(path) as (_, batches):
            for batch in batches:
                try:
                    batch.validate(full=True)
                except pa.ArrowInvalid as error:
                    raise DamageError(
                        f"{path.name}: damaged: {error}", "Get the file again."
                    ) from None
                yield batch


@contextmanager
def _open_arrow(path: Path) -> Iterator[tuple[pa.Schema, Iterator[pa.RecordBatch]]]:
    """The schema and the batches of an IPC file or stream."""
    with open(path, "rb") as file:
        is_file = file.read(6) == b"ARROW1"
    with pa.OSFile(str(path)) as source:
        if not is_file:
            with ipc.open_stream(source) as stream:
                yield stream.schema, iter(stream)
            return
        with ipc.open_file(source) as opened:
            yield opened.schema, map(opened.get_batch, range(opened.num_record_batches))


class _ParquetReader(_ArrowReader):
    def _schema_of(self, path: Path) -> pa.Schema:
        """The columns; pandas' categories become what they stand for."""
        schema = pq.read_schema(path)
        fields = [
            field.with_type(field.type.value_type) if pa.types.is_dictionary(field.type) else field
            for field in schema
        ]
        # What `datasets` wrote there: images, and names of classes.
        features = (schema.metadata or {}).get(HUGGINGFACE)
        return pa.schema(fields, metadata={HUGGINGFACE: features} if features else None)

    def _batches(self, path: Path) -> Iterator[pa.RecordBatch]:
        with pq.ParquetFile(path) as file:
            yield from file.iter_batches(batch_size=_ROWS)
