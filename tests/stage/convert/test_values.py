"""A conversion changes no value. Values that no type keeps are text; unclear files are refused."""

from __future__ import annotations

import csv
import gzip
import io
import math
import shlex
import subprocess
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stage.convert.convert import convert
from stage.errors import UsageError
from stage.hub.layout import splits_of_names
from tests.remedies.obeyed import obeys

Convert = Callable[..., pa.Table]
NO_VALUE = ["", "NA", "N/A", "NaN", "nan", "null", "NULL", "None", "<NA>", "#N/A"]


@pytest.fixture
def converted(converted: Callable[..., dict[str, pa.Table]]) -> Convert:
    """Converts files, given as bytes, to the split `train`."""

    def run(how: str, *files: bytes, name: str = "", notes: list[str] | None = None) -> pa.Table:
        named = {name or f"{number}.{how}": data for number, data in enumerate(files)}
        return converted(how, named, notes)["train"]

    return run


def column(*cells: str) -> bytes:
    """A CSV of one column `a`, and one that is never empty."""
    sink = io.StringIO()
    csv.writer(sink).writerows([["a", "z"], *([cell, "z"] for cell in cells)])
    return sink.getvalue().encode()


KEPT: dict[str, tuple[list[str], list[Any]]] = {
    # cells -> values; texts are the cells as they were written
    "pandas' texts for no value": ([*NO_VALUE, "1"], [*[None] * len(NO_VALUE), 1]),
    "whole numbers with gaps": (["1", "", "3"], [1, None, 3]),
    "the ends of int64": (["-9223372036854775808", "9223372036854775807"], [-(2**63), 2**63 - 1]),
    "spaces around": ([" 1", "2 ", "\t3"], [1, 2, 3]),
    "exponents": (["1e5", "2E-3", "7"], [1e5, 2e-3, 7.0]),
    "zeros at the end": (["0.1000000000000000000000", "2.50"], [0.1, 2.5]),
    "minus zero": (["-0", "1"], [-0.0, 1.0]),
    "infinities": (["inf", "-Inf", "1"], [math.inf, -math.inf, 1.0]),
    "true and false of R and Python": (["TRUE", "False", "true", "NA"], [True, False, True, None]),
}
TEXTS: dict[str, list[str]] = {
    "leading zeros": ["007", "1"],
    "leading zeros of a fraction": ["-00.5", "1"],
    "a sign": ["+49", "1"],
    "thousands": ["1,000", "2"],
    "underscores": ["1_000", "2"],
    "hexadecimal": ["0x1F", "1"],
    "an id of 20 digits": ["12345678901234567890", "1"],
    "a round id beyond 64 bits": ["10000000000000000000", "1"],
    "a round id beyond 64 bits among fractions": ["10000000000000000000", "0.5"],
    "an id of 16 digits among fractions": ["9007199254740993", "0.5"],
    "a decimal of 25 digits": ["0.1234567890123456789012345", "1"],
    "a decimal of 17 digits that no float64 is": ["0.30000000000000003", "1"],
    "more than a float64 holds": ["1e400", "1"],
    "less than a float64 holds": ["1e-400", "1"],
    "a number whose last digits a small float64 loses": ["1.23456789e-320", "1"],
    "odd letters of true": ["tRuE", "false"],
    "true and one": ["true", "1"],
    "dashes": ["-", "1"],
    "dates": ["2024-01-31", "2024-02-01"],
    "a person called Nan": ["Nan", "Nan"],
    "nothing but infinity": ["Infinity", "Infinity"],
    "what C reads as not a number": ["nan(1)", "1"],
    "nothing but texts for no value": ["NA", "None", "null"],
    "texts for no value among texts": ["NA", "None", "x", ""],
    "digits of other scripts": ["١٢", "１２"],
    "a space that is no ASCII": ["\xa01", "2"],
    "a number and a unit": ["1 kg", "2"],
    "a number of 5000 digits": [f"0.{'1' * 5000}", "1"],
}


@pytest.mark.parametrize("name", KEPT)
def test_numbers_and_truth_become_what_they_are(converted: Convert, name: str) -> None:
    cells, values = KEPT[name]
    found = converted("csv", column(*cells))["a"].to_pylist()
    assert list(map(repr, found)) == list(map(repr, values))


@pytest.mark.parametrize("name", TEXTS)
def test_what_a_number_would_lose_stays_as_it_was_written(converted: Convert, name: str) -> None:
    assert converted("csv", column(*TEXTS[name]))["a"].to_pylist() == TEXTS[name]


@pytest.mark.parametrize(
    "cells", [("9007199254740993", "0.5"), ("true", "1"), ("1e5", "007"), ("1", "tRuE")]
)
def test_two_files_lose_no_more_than_one(converted: Convert, cells: tuple[str, str]) -> None:
    """Each alone has a type; a type for both would lose something of one."""
    for order in (cells, cells[::-1]):
        assert converted("csv", *map(column, order))["a"].to_pylist() == list(order)


CELL = st.one_of(
    st.sampled_from(
        [
            *NO_VALUE,
            *(cell for cells in TEXTS.values() for cell in cells if len(cell) < 99),
        ]
    ),
    st.integers(-(10**22), 10**22).map(str),
    st.decimals(allow_nan=False, allow_infinity=False, places=20).map(str),
    st.floats().map(repr),
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\r\n"), max_size=6),
)


@given(columns=st.lists(st.lists(CELL, min_size=3, max_size=3), min_size=2, max_size=3))
@settings(max_examples=300)
def test_every_cell_is_what_the_csv_module_reads(
    tmp_path_factory: pytest.TempPathFactory, columns: list[list[str]]
) -> None:
    """Whether a value is its cell: a text or a printed whole number is equal to it; a fraction is
    its float and keeps its digits."""
    folder = tmp_path_factory.mktemp("x")
    rows = list(zip(*columns, strict=True))
    with open(folder / "x.csv", "w", newline="") as file:
        csv.writer(file).writerows([[f"c{i}" for i in range(len(columns))], *rows])
    made = convert("csv", {"x.csv": folder / "x.csv"}, splits_of_names, folder / "out")
    table = pq.read_table(made["train"].shards[0])
    for found, cells in zip(table.columns, columns, strict=True):
        for value, cell in zip(found.to_pylist(), cells, strict=True):
            bare = cell.strip(" \t")
            if isinstance(value, str):
                assert value == cell
            elif value is None:
                assert cell in (*NO_VALUE, "-nan", "-NaN")
            elif isinstance(value, bool):
                assert str(value).lower() == cell.lower()
            elif isinstance(value, int):
                assert str(value) == bare
            else:
                assert math.isinf(value) or is_nearest(value, bare)


def is_nearest(value: float, cell: str) -> bool:
    """Whether a float is the nearest one to a cell, and rounds to it at the cell's last digit."""
    number = Decimal(cell)
    unit = Fraction(10) ** int(number.as_tuple().exponent)
    lost = abs(Fraction(value) - Fraction(number))
    return value == float(cell) and (lost <= unit / 2 or Decimal(repr(value)) == number)


REFUSED: dict[str, tuple[str, bytes, str]] = {
    "a quote that is never closed": (
        "csv",
        b'a,b\n1,2\n"x,1\ny,2\nz,3\n',
        "row that begins in line 3 .* to line 5",
    ),
    "one in a single column": ("csv", b'a\nx\n"y\nz\n', "row that begins in line 3 .* to line 4"),
    "a quote that the next one closes": (
        "csv",
        b'a,b\n"x,1\n"y,2\n',
        "lines 2 to 3: a quoted cell continues",
    ),
    "quotes escaped by backslashes": (
        "csv",
        b'a,b\n1,2\n"say \\"hi\\"",2\n',
        "line 3: a quoted cell continues",
    ),
    "a NUL byte": ("csv", b"a,b\n1,2\nx\0y,2\n", "line 3 has a NUL byte"),
    "zeros at the end of a torn file": (
        "jsonl",
        b'{"a": 1}\n' + bytes(5000),
        "line 2 has a NUL byte",
    ),
    "zeros in a text": ("text", b"a\n" * 4000 + b"\0b", "line 4001 has a NUL byte"),
    "a character cut in two": ("text", "x\nü".encode()[:-1], "ends within a character, in line 2"),
    "one byte that is none": (
        "text",
        ("好" * 30 + "\n").encode() + b"\xff",
        "line 2 is not UTF-8 .*: it is damaged",
    ),
    "objects without a comma": ("json", b'[{"a": 1}\n{"a": 2}]', "line 2: between two values"),
    "two commas": ("json", b'[{"a": 1},\n,{"a": 2}]', "line 2: not JSON"),
    "a comma before": ("json", b'[,{"a": 1}]', "line 1: not JSON"),
    "a comma behind": ("json", b'[{"a": 1},\n]', "line 2: not JSON"),
    "a comma between bare objects": ("json", b'{"a": 1},\n{"a": 2}', "line 1: after an object"),
    "a key twice": (
        "json",
        b'[{"a": 1},\n{"a": 1, "a": 2}]',
        "begins in line 2: `a` is written twice",
    ),
    "a key twice, in a line": (
        "jsonl",
        b'{"a": 1}\n{"a": {"b": 1, "b": 1}}',
        "line 2: `b` is written twice",
    ),
    "a fraction beyond float64": ("jsonl", b'{"a": 1}\n{"a": 1e999}', "line 2: 1e999 is more"),
    "a whole number beyond 64 bits": (
        "jsonl",
        b'{"a": 18446744073709551616}',
        "does not fit 64 bits",
    ),
    "truth among fractions": (
        "jsonl",
        b'{"a": 1.5}\n{"a": true}',
        r"`a` is a fraction in .* line 1 \(1.5\) and true or false in .* line 2 \(true\)",
    ),
    "truth among fractions, inside": (
        "json",
        b'[{"a": [{"b": 1.5}, {"b": true}]}]',
        r"`a\[\].b` is a fraction in .* line 1 \(1.5\) and true or false",
    ),
}


BAD_ROWS = b'a,b\n1,2\n1,2,3\n"x\ny",2\n1\n' + b"1\n" * 3
REFUSED |= {
    "no byte": ("csv", b"", "it is empty: a CSV begins with a line of names"),
    "blank lines alone": ("csv", b"\r\n\n", "it is empty: a CSV begins with a line of names"),
    "more and fewer cells": (
        "csv",
        BAD_ROWS,
        "the header has 2 cells, but line 3 has 3: '1,2,3'; line 6 has 1: '1'; "
        "line 7 has 1: '1'; and 2 more rows",
    ),
    "a text that is no CSV": ("csv", b"It was\na, dark\nand, stormy night\n", "has 1 cell, but"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_parser_would_read_otherwise_is_refused_with_its_line(
    converted: Convert, name: str
) -> None:
    how, data, said = REFUSED[name]
    with pytest.raises(UsageError, match=said) as caught:
        converted(how, data)
    assert "m.yaml:3" in caught.value.message and caught.value.remedy


ENCODED: dict[str, str] = {
    "UTF-16": "姓名,年龄\n王芳,31\n",
    "UTF-16LE": "name,age\nanna,31\n",
    "UTF-16BE": "name,age\nanna,31\n",
    "GB18030": "姓名,年龄\n王芳,31\n李伟,28\n",
    "CP1251": "имя,возраст\nИван Петров,31\nМария,28\n",
    "CP1252": "name,stadt\nMüller,Köln\n",
}


@obeys("stage/text.py", "Save it as UTF-8: iconv -f {} -t UTF-8")
@pytest.mark.parametrize("encoding", ENCODED)
@pytest.mark.parametrize("packed", [False, True])
def test_the_command_for_another_encoding_makes_a_file_that_converts(
    converted: Convert, tmp_path: Path, encoding: str, packed: bool
) -> None:
    name, data = "my table.csv", ENCODED[encoding].encode(encoding)
    if packed:
        name, data = f"{name}.gz", gzip.compress(data)
    with pytest.raises(UsageError, match=encoding) as caught:
        converted("csv", data, name=name)
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / name).write_bytes(data)
    subprocess.run(caught.value.remedy, shell=True, check=True, cwd=tmp_path / "own")
    made = shlex.split(caught.value.remedy, comments=True)[-1]
    rows = list(csv.reader(ENCODED[encoding].splitlines()))
    table = converted("csv", (tmp_path / "own" / made).read_bytes())
    assert table.column_names == rows[0]
    assert [list(map(str, row.values())) for row in table.to_pylist()] == rows[1:]


def test_a_table_of_pandas_comes_back_bit_for_bit(converted: Convert) -> None:
    dice = np.random.default_rng(3)
    frame = pd.DataFrame(
        {
            "f": dice.standard_normal(5000) * 10.0 ** dice.integers(-300, 300, 5000),
            "i": dice.integers(-(2**63), 2**63 - 1, 5000),
            "b": dice.integers(0, 2, 5000).astype(bool),
            "t": [f'"{n},\n' for n in range(5000)],
        }
    )
    frame.loc[7, "f"] = math.nan
    table = converted("csv", frame.to_csv(index=False).encode())
    assert table.schema.types == [pa.float64(), pa.int64(), pa.bool_(), pa.string()]
    assert table["f"][7].as_py() is None
    pd.testing.assert_frame_equal(table.to_pandas(), frame)
