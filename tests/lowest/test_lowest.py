"""The work of every environment that has airlift, with any versions of its requirements.

`scripts/lowest` runs this with the lowest versions that pyproject.toml allows; `scripts/test` with
the newest.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.stage.bundles import make_bundle


def run(*arguments: str | Path, code: int) -> str:
    """Runs `python -m ARGUMENTS`. It must end with `code` and no traceback. Returns the output."""
    done = subprocess.run(
        [sys.executable, "-m", *map(str, arguments)], capture_output=True, text=True, timeout=120
    )
    said = done.stdout + done.stderr
    assert (done.returncode, "Traceback" in said) == (code, False), said
    return said


def test_lowest_a_bundle_is_verified_shown_and_found_damaged(tmp_path: Path) -> None:
    root = make_bundle(tmp_path / "bundle").root
    assert "sound" in run("stage", "verify", root, code=0)
    assert "bert" in run("stage", "show", root, code=0)
    path = next(root.glob("data/models/*/config.json"))
    path.write_bytes(path.read_bytes().replace(b"b", b"c", 1))
    assert "config.json" in run("stage", "verify", root, code=1)


def test_lowest_rows_and_columns_of_parquet(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    from runner.data.table import columns
    from stage.bundle.inspect import parquet_footer

    path = tmp_path / "a.parquet"
    table = pa.table({"text": ["a", None] * 1250, "ids": [[1, 2]] * 2500})
    pq.write_table(table, path, row_group_size=700)
    footer = parquet_footer(path)
    assert (footer.rows, [column.name for column in footer.schema]) == (2500, ["text", "ids"])
    split = cast(Any, SimpleNamespace(files=[path], rows=2500, part=None))
    assert sum(len(batch["ids"]) for batch in columns(split, ["ids"], 1300)) == 1300
    assert next(columns(split, ["text"], None))["text"][:2] == ["a", None]


@pytest.mark.parametrize(
    ("command", "library"),
    [(["lock", "/nowhere.yaml"], "truststore"), (["verify", "--deep", "/nowhere"], "pyarrow")],
)
def test_lowest_what_needs_an_extra_has_it_or_names_it(command: list[str], library: str) -> None:
    has_it = find_spec(library) is not None
    assert ("/nowhere" if has_it else "[laptop]") in run("stage", *command, code=2)
