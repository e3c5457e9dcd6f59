"""Writes batches of rows as the parquet files of a split."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from stage.paths import printable

ROW_GROUP_ROWS = 100_000
ROW_GROUP_BYTES = 64 * 2**20  # of Arrow data: a reader holds one row group in memory
SHARD_BYTES = 500 * 10**6  # as on the Hub; compared after each row group


def write_split(
    schema: pa.Schema, batches: Iterator[pa.RecordBatch], folder: Path, split: str
) -> list[Path]:
    """Writes `<split>-00000-of-0000N.parquet`: at least one file, also without rows.

    Returns:
        The files, in order.
    """
    parts: list[Path] = []
    writer: pq.ParquetWriter | None = None
    for table in joined(schema, batches, ROW_GROUP_ROWS, ROW_GROUP_BYTES):
        if writer is None:
            parts.append(folder / f"part-{len(parts)}")
            writer = _open(parts[-1], schema)
        writer.write_table(table, row_group_size=max(1, table.num_rows))
        if parts[-1].stat().st_size >= SHARD_BYTES:
            writer.close()
            writer = None
    if writer is None and not parts:
        parts.append(folder / "part-0")
        writer = _open(parts[0], schema)
    if writer is not None:
        writer.close()
    shards = [folder / f"{split}-{i:05d}-of-{len(parts):05d}.parquet" for i in range(len(parts))]
    for part, shard in zip(parts, shards, strict=True):
        part.rename(shard)
    return shards


def first_unfit(schema: pa.Schema) -> tuple[str, str] | None:
    """The first column that parquet cannot hold, and the reason; None if it can hold all."""
    for field in () if _fits(schema) else schema:
        if not _fits(pa.schema([field])):
            empty = _empty_object(field.name, field.type)
            return (
                field.name,
                f"every object in {printable(empty)} is empty"
                if empty
                else f"it is of {str(field.type)[:100]}",
            )
    return None


def _fits(schema: pa.Schema) -> bool:
    """Whether pyarrow can write this schema, and read it again.

    It is tried with a row of nulls: pyarrow refuses some types only at the first row, and reads
    less deeply nested ones than it writes.
    """
    nullable = pa.schema([pa.field(field.name, field.type) for field in schema])
    file = io.BytesIO()
    try:
        with _open(file, nullable) as writer:
            writer.write_table(
                pa.table([pa.nulls(1, field.type) for field in nullable], schema=nullable)
            )
        pq.read_schema(file)
    except (pa.ArrowException, OSError):
        return False
    return True


def _empty_object(path: str, type_: pa.DataType) -> str | None:
    """The path in a column of an object type without keys: `meta`, `meta.inner`, `list[]`."""
    if pa.types.is_struct(type_):
        inside = [(f"{path}.{field.name}", field.type) for field in type_]
        if not inside:
            return path
    elif pa.types.is_map(type_):
        inside = [(f"{path}[]", type_.item_type)]
    elif hasattr(type_, "value_type"):  # lists of all kinds, dictionaries
        inside = [(f"{path}[]", type_.value_type)]
    else:
        inside = []
    return next((found for part in inside if (found := _empty_object(*part))), None)


def _open(target: Path | io.BytesIO, schema: pa.Schema) -> pq.ParquetWriter:
    return pq.ParquetWriter(
        target, schema, compression="zstd", version="2.6", data_page_version="1.0"
    )


def joined(
    schema: pa.Schema, batches: Iterator[pa.RecordBatch], most_rows: int, most_bytes: int
) -> Iterator[pa.Table]:
    """Joins small batches and cuts large ones, by rows and by bytes."""
    waiting: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        step = max(1, min(most_rows, batch.num_rows * most_bytes // max(batch.nbytes, 1)))
        for start in range(0, batch.num_rows, step):
            part = batch.slice(start, step)
            if waiting and (rows + part.num_rows > most_rows or size + part.nbytes > most_bytes):
                yield pa.Table.from_batches(waiting, schema)
                waiting, rows, size = [], 0, 0
            waiting.append(part)
            rows, size = rows + part.num_rows, size + part.nbytes
    if waiting:
        yield pa.Table.from_batches(waiting, schema)
