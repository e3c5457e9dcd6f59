"""What tests of conversions share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stage.convert.convert import convert
from stage.errors import about
from stage.hub.layout import splits_of_names


@pytest.fixture
def converted(tmp_path: Path) -> Callable[..., dict[str, pa.Table]]:
    """Converts files given as bytes; returns each split as a table. Appends what is said."""

    def run(
        how: str, files: dict[str, bytes], notes: list[str] | None = None
    ) -> dict[str, pa.Table]:
        inside = tmp_path / "in"
        for path, data in files.items():
            (inside / path).parent.mkdir(parents=True, exist_ok=True)
            (inside / path).write_bytes(data)
        out = tmp_path / f"out-{len(list(tmp_path.iterdir()))}"
        with about("m.yaml:3: `x`"):
            made = convert(
                how,
                {path: inside / path for path in files},
                splits_of_names,
                out,
                note=(notes if notes is not None else []).append,
            )
        return {
            split: pa.concat_tables(pq.read_table(s) for s in part.shards)
            for split, part in made.items()
        }

    return run
