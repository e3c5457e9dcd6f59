"""Conversion to parquet keeps every row and every value, and gives the same bytes each time."""

from __future__ import annotations

import io
import random
import subprocess
import sys
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc as ipc
import pyarrow.parquet as pq
import pytest

from stage.convert.convert import convert
from stage.convert.images import Array
from stage.errors import UsageError
from stage.hub.layout import splits_of_names
from tests.stage.hub.raw_dataset import arrow


def test_splits_have_one_schema(converted: Callable[..., dict[str, pa.Table]]) -> None:
    tables = converted("csv", {"train.csv": b"a,b,c\n1,,x\n", "test.csv": b"a,b,c\n1.5,2,3\n"})
    assert tables["train"].schema == tables["test"].schema
    assert tables["train"].to_pylist() == [{"a": 1.0, "b": None, "c": "x"}]
    assert tables["test"].to_pylist() == [{"a": 1.5, "b": 2, "c": "3"}]


@pytest.mark.parametrize("opened", [ipc.new_file, ipc.new_stream])
def test_arrow_files_and_streams(
    converted: Callable[..., dict[str, pa.Table]], opened: Any
) -> None:
    table = pa.table({"a": [1, 2, None], "b": pa.array(["x", "y", "x"]).dictionary_encode()})
    sink = io.BytesIO()
    with opened(sink, table.schema) as writer:
        writer.write_table(table)
    assert (
        converted("arrow", {"data-00000-of-00001.arrow": sink.getvalue()})["train"].to_pylist()
        == table.to_pylist()
    )


LABELS = pa.table({"x": [1]})
REFUSED: dict[str, tuple[str, dict[str, bytes], str]] = {
    "ragged csv": ("csv", {"x.csv": b"a,b\n1,2\n1,2,3\n"}, "x.csv"),
    "empty csv": ("csv", {"x.csv": b""}, "x.csv"),
    "two columns of one name": ("csv", {"x.csv": b"a,a\n1,2\n"}, "two columns"),
    "other columns": ("csv", {"train-1.csv": b"a\n1\n", "train-2.csv": b"b\n1\n"}, "columns"),
    "latin-1 csv": ("csv", {"x.csv": "a\nü\n".encode("latin1")}, "UTF"),
    "latin-1 text": ("text", {"x.txt": "ü\n".encode("latin1")}, "UTF"),
    "latin-1 jsonl": ("jsonl", {"x.jsonl": '{"a": "ü"}'.encode("latin1")}, "UTF"),
    "jsonl that is none": ("jsonl", {"x.jsonl": b'{"a": 1}\n{"a":\n'}, "line 2: not JSON"),
    "json that ends early": ("json", {"x.json": b'[{"a": 1}, {"a"'}, "not JSON"),
    "json of numbers": (
        "json",
        {"x.json": b"[1, 2]"},
        "line 1: a row is not an object but a whole number",
    ),
    "json of mixed types": (
        "jsonl",
        {"x.jsonl": b'{"a": 1}\n{"a": "x"}\n'},
        r"`a` is a whole number in x.jsonl, line 1 \(1\) and text in x.jsonl, line 2 \(\"x\"\)",
    ),
    "json without rows": ("json", {"x.json": b"[]"}, "no rows"),
    "json behind an array": (
        "json",
        {"x.json": b'[{"a": 1}] garbage'},
        "after the end of an array comes 'garbage'",
    ),
    "an object behind an array": (
        "json",
        {"x.json": b'[{"a": 1}]\n{"a": 2}'},
        "after the end of an array comes",
    ),
    "a comma behind an array": (
        "json",
        {"x.json": b'[{"a": 1}],[{"a": 2}]'},
        "after the end of an array comes",
    ),
    "an array behind an object": (
        "json",
        {"x.json": b'{"a": 1}\n[{"a": 2}]'},
        "line 2: a row is not an object but a list",
    ),
    "empty objects": (
        "jsonl",
        {"x.jsonl": b'{"a": 1, "meta": {}}\n'},
        "every object in `meta` is empty",
    ),
    "empty objects in a list": (
        "jsonl",
        {"x.jsonl": b'{"a": [{}]}\n'},
        r"every object in `a\[\]` is empty",
    ),
    "empty objects in an object": (
        "json",
        {"a/x.json": b'[{"b": 1}]', "b/y.json": b'[{"a": {"b": [{"c": {}}]}}]'},
        r"b/y.json: .* column `a`: every object in `a.b\[\].c` is empty",
    ),
    "deep json": (
        "jsonl",
        {"x.jsonl": b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"},
        "nested",
    ),
    "arrow that is none": ("arrow", {"x.arrow": b"ARROW1\0\0 nothing"}, "x.arrow"),
    "stream that is none": ("arrow", {"x.arrow": b"\xff\xff\xff\xff\xff\xff\xff\x7f"}, "x.arrow"),
    "arrow with other columns": (
        "arrow",
        {"a.arrow": arrow(pa.table({"x": [1]})), "b.arrow": arrow(pa.table({"y": [1]}))},
        "b.arrow: it has the columns y; the files before it x",
    ),
    "arrow with other class names": (
        "arrow",
        {f"{n}.arrow": arrow(LABELS.replace_schema_metadata({"huggingface": n})) for n in "ab"},
        "b.arrow: the names of its classes",
    ),
    "arrow with a decimal in one file": (
        "arrow",
        {"a.arrow": arrow(LABELS), "b.arrow": arrow(pa.table({"x": [Decimal("1.5")]}))},
        "b.arrow: its column x is decimal",
    ),
    "no such files": ("csv", {"x.parquet": b"", "y.parquet": b""}, "no file ends in"),
    "metadata that says nothing": (
        "imagefolder",
        {"x.png": b"", "metadata.csv": b"name\nx.png\n"},
        "`file_name`",
    ),
    "metadata of what is not there": (
        "imagefolder",
        {"a/x.png": b"", "metadata.csv": b"file_name\nx.png\n"},
        "metadata.csv: row 1: it names the image 'x.png'",
    ),
    "metadata that leads out": (
        "imagefolder",
        {"x.png": b"", "a/y.png": b"", "a/metadata.jsonl": b'{"file_name": "../x.png"}\n'},
        "not below the metadata file",
    ),
    "metadata with an empty name": (
        "imagefolder",
        {"x.png": b"", "metadata.csv": b"file_name,a\n,1\nx.png,2\n"},
        "row 1: it names the image ''",
    ),
    "metadata of two kinds": (
        "imagefolder",
        {
            "x.png": b"",
            "metadata.csv": b"file_name\nx.png\n",
            "a/metadata.jsonl": b'{"file_name": "x"}\n',
        },
        "both metadata.csv and metadata.jsonl",
    ),
    "metadata in one split of two": (
        "imagefolder",
        {"train/x.png": b"", "train/metadata.csv": b"file_name\nx.png\n", "test/y.png": b""},
        "split `test` has images and no metadata.csv",
    ),
    "metadata with an image column": (
        "imagefolder",
        {"x.png": b"", "metadata.csv": b"file_name,image\nx.png,a\n"},
        "two columns `image`",
    ),
    "an empty image": ("imagefolder", {"a/x.png": b""}, "a/x.png is no image: it is empty"),
    "a page in place of an image": (
        "imagefolder",
        {"x.JPG": b"<!DOCTYPE html>", "metadata.csv": b"file_name\nx.JPG\n"},
        "metadata.csv: row 1: x.JPG is no image: it begins with b'<!DOCTYPE ht'",
    ),
    "half a png": ("imagefolder", {"a/x.png": b"\x89PNG..IDAT.."}, "a/x.png is not whole"),
    "half a jpeg": ("imagefolder", {"x.jpg": b"\xff\xd8.."}, "x.jpg is not whole: its end is"),
    "no images": ("imagefolder", {"a/x": b""}, "no image"),
    "half a cifar": ("cifar", {"batches.meta": b"", "data_batch_1": b""}, "data_batch_2"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_converted_is_said(
    converted: Callable[..., dict[str, pa.Table]], name: str
) -> None:
    how, files, said = REFUSED[name]
    with pytest.raises(UsageError, match=said) as caught:
        converted(how, files)
    assert "m.yaml:3" in caught.value.message and caught.value.remedy


def test_a_batch_in_columns_order_is_turned() -> None:
    array = Array()
    values = np.arange(6, dtype=np.uint8).reshape(2, 3)
    array.shape, array.is_fortran, array.data = (2, 3), True, values.tobytes("F")
    assert array.as_rows() == values.tobytes()


def test_memory_stays_bounded_whatever_the_file(tmp_path: Path) -> None:
    """Converting large CSV and JSON files takes little more memory than a small file.

    As objects of Python, the rows of either would take more than is allowed.
    """
    text = "hello world this is a line of some length"
    for name, header, line, rows, most_kib in (
        ("csv", "a,b\n", f"{{}},{text}\n", 1_200_000, 200_000),
        ("json", "", f'{{{{"a": {{}}, "b": "{text}"}}}}\n', 500_000, 100_000),
    ):
        peaks = []
        for size in (1_000, rows):
            path = tmp_path / f"{size}.{name}"
            with open(path, "w") as file:
                file.write(header)
                file.writelines(line.format(i) for i in range(size))
            code = (
                "import re, sys; from pathlib import Path;"
                "from stage.convert.convert import convert;"
                "convert(sys.argv[1], {'x': Path(sys.argv[2])}, lambda p: {'train': p},"
                " Path(sys.argv[3]));"
                # Not `ru_maxrss`, which is never less than this process had when it forked.
                "print(re.search(r'VmHWM:\\s+(\\d+)', Path('/proc/self/status').read_text())[1])"
            )
            command = [
                sys.executable,
                "-c",
                code,
                name,
                str(path),
                str(tmp_path / f"out-{name}-{size}"),
            ]
            peaks.append(
                int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            )
        assert peaks[1] - peaks[0] < most_kib, (name, peaks)


def test_the_same_files_give_the_same_bytes(tmp_path: Path) -> None:
    dice = random.Random(1)
    lines = "".join(
        f"{dice.random()},{dice.choice('abc')},{'x' * dice.randrange(90)}\n" for _ in range(150_000)
    )
    (tmp_path / "x.csv").write_text("number,letter,text\n" + lines)
    made = [
        convert("csv", {"x.csv": tmp_path / "x.csv"}, splits_of_names, tmp_path / str(i))[
            "train"
        ].shards[0]
        for i in range(2)
    ]
    assert made[0].read_bytes() == made[1].read_bytes()
    assert pq.ParquetFile(made[0]).num_row_groups == 2


def test_types_of_a_csv_hold_every_value_of_every_file(
    converted: Callable[..., dict[str, pa.Table]],
) -> None:
    head = "int,late,zip,long,flag,gone,mix\n"
    rows = "".join(f"{i},{i},0{i},{10**19 + i},true,,{i}\n" for i in range(20_000))
    tables = converted(
        "csv", {"a.csv": (head + rows).encode(), "b.csv": (head + "1,2.5,3,4,false,,x\n").encode()}
    )
    schema = tables["train"].schema
    expected = {
        "int": "int64",
        "late": "double",
        "zip": "string",
        "long": "string",
        "flag": "bool",
        "gone": "string",
    }
    assert {n: str(schema.field(n).type) for n in expected} == expected and str(
        schema.field("mix").type
    ) == "string"
    assert tables["train"].num_rows == 20_001
