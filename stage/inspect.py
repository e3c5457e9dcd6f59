"""Opens what is inside a bundle without running any of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from stage.errors import DamageError
from stage.lockfile import Column


@dataclass(frozen=True)
class ParquetFooter:
    """What a parquet file says of itself: rows, and columns with their Arrow types."""

    rows: int
    schema: tuple[Column, ...]


def parquet_footer(path: Path) -> ParquetFooter:
    """Reads the footer of a parquet file, not its rows.

    Raises:
        DamageError: it is no parquet file.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            schema = file.schema_arrow
            return ParquetFooter(file.metadata.num_rows, tuple(Column(f.name, str(f.type)) for f in schema))
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, OSError) as error:
        raise DamageError(
            f"{path.name}: not a parquet file that pyarrow can read: {error}.",
            "The repository's file itself is broken: try another revision.",
        ) from None
