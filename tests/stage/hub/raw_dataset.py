"""A dataset of raw files on the test Hub, and what tests of its conversion share."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc as ipc
import pyarrow.parquet as pq
import yaml

from stage.bundle.bundle import Bundle

ID = "acme/raw"


def card(**front: Any) -> bytes:
    return f"---\n{yaml.safe_dump(front)}---\n".encode()


def manifest(**more: Any) -> None:
    asset = {"dataset": ID, **more}
    Path("m.yaml").write_text(json.dumps({"format": 1, "name": "m", "assets": {"raw": asset}}))


def rows(split: str, config: str = "default") -> list[dict[str, Any]]:
    shards = Bundle.open(Path("b")).asset("raw").configs[config][split].shards
    return [row for shard in shards for row in pq.read_table(Path("b", shard)).to_pylist()]


def arrow(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    with ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()
