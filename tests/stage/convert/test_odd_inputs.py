"""A hundred odd inputs: each has exactly the values of the contract, or a refusal that helps.

A CSV column is whole numbers, fractions or true/false if every cell of every file is written as one
and the type gives the same number back, else text. JSON has its own types. Where `load_dataset`
would give other values, a line says so.
"""

from __future__ import annotations

import gzip
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from stage.convert.convert import convert
from stage.errors import UsageError, about
from stage.hub.layout import splits_of_names
from tests.remedies.obeyed import in_it, obeys


@dataclass(frozen=True)
class Odd:
    """An input.

    Attributes:
        files: name -> bytes.
        columns: the values by column; None: it is refused.
        types: of the columns, where they are not plain from the values.
        says: patterns, one for each note; or those that the refusal has.
        remedy: the repaired files, made as the refusal's remedy says; they must convert.
    """

    files: dict[str, bytes]
    columns: dict[str, list[Any]] | None = None
    types: str = ""
    says: tuple[str, ...] = ()
    remedy: dict[str, bytes] | None = None
    separator: str | None = None
    how: str = ""


def table(text: str, encoding: str = "utf-8") -> dict[str, bytes]:
    return {"a.csv": text.encode(encoding)}


def rows(*lines: str) -> dict[str, bytes]:
    return {"a.jsonl": "\n".join(lines).encode()}


NULL_IN_TEXT = r"`{}` is text, also {}; `load_dataset` would read null there"
FINE: dict[str, Odd] = {
    "quotes": Odd(table('a,b\n"x, ""y""",1\n'), {"a": ['x, "y"'], "b": [1]}),
    "line ends in quotes": Odd(table('a,b\n"x\r\ny\n",1\n'), {"a": ["x\r\ny\n"], "b": [1]}),
    "a quote within a cell": Odd(table('a,b\n5" disk,1\n'), {"a": ['5" disk'], "b": [1]}),
    "a quoted number": Odd(table('a,b\n"1","x"\n'), {"a": [1], "b": ["x"]}),
    "BOM": Odd({"a.csv": b"\xef\xbb\xbfa,b\n1,2\n"}, {"a": [1], "b": [2]}),
    "BOM and a quoted name": Odd({"a.csv": b'\xef\xbb\xbf"a",b\n1,2\n'}, {"a": [1], "b": [2]}),
    "CRLF": Odd(table("a,b\r\n1,2\r\n"), {"a": [1], "b": [2]}),
    "old Mac": Odd(table("a,b\r1,2\r3,4\r"), {"a": [1, 3], "b": [2, 4]}),
    "no line end": Odd(table("a,b\n1,2"), {"a": [1], "b": [2]}),
    "blank lines": Odd(table("\na,b\n\n1,2\n\n"), {"a": [1], "b": [2]}),
    "the largest int64": Odd(table("a,b\n9223372036854775807,1\n"), {"a": [2**63 - 1], "b": [1]}),
    "beyond int64": Odd(
        table("a,b\n9223372036854775808,1\n"),
        {"a": ["9223372036854775808"], "b": [1]},
        says=("`a` is text, as written: '9223372036854775808'; .* numbers",),
    ),
    "ids of 20 digits": Odd(
        table("a,b\n12345678901234567890,1\n"),
        {"a": ["12345678901234567890"], "b": [1]},
        says=("`a` is text",),
    ),
    "ids of 24 digits": Odd(
        table("a,b\n123456789012345678901234,1\n"),
        {"a": ["123456789012345678901234"], "b": [1]},
    ),
    "leading zeros": Odd(
        table("a,b\n007,1\n010,2\n"),
        {"a": ["007", "010"], "b": [1, 2]},
        says=("`a` is text, as written: '007'; `load_dataset` would read numbers",),
    ),
    "a leading zero late": Odd(
        table("a,b\n" + "1,2\n" * 20_000 + "01,2\n"),
        {"a": ["1"] * 20_000 + ["01"], "b": [2] * 20_001},
        says=("`a` is text, as written: '01'",),
    ),
    "a fraction late": Odd(
        table("a,b\n" + "1,2\n" * 20_000 + "0.5,2\n"),
        {"a": [1.0] * 20_000 + [0.5], "b": [2] * 20_001},
    ),
    "a word late": Odd(
        table("a,b\n" + "1,2\n" * 20_000 + "x,2\n"),
        {"a": ["1"] * 20_000 + ["x"], "b": [2] * 20_001},
        says=("`a` is text: 'x' is no number that int64 or float64 keeps",),
    ),
    "nulls among whole numbers": Odd(
        table("a,b\n1,x\nNA,y\n,z\n"),
        {"a": [1, None, None], "b": ["x", "y", "z"]},
        says=("`a` is whole numbers, null for 'NA'; `load_dataset` would read fractions",),
    ),
    "nulls among fractions": Odd(
        table("a,b\n0.5,x\nnull,y\n"), {"a": [0.5, None], "b": ["x", "y"]}
    ),
    "nulls among truths": Odd(
        table("a,b\ntrue,x\n,y\nFALSE,z\n"), {"a": [True, None, False], "b": ["x", "y", "z"]}
    ),
    "words for no value in text": Odd(
        table("a,b\nNA,1\nx,2\n,3\n"),
        {"a": ["NA", "x", ""], "b": [1, 2, 3]},
        says=(NULL_IN_TEXT.format("a", "'NA'"),),
    ),
    "nothing but empty cells": Odd(
        table("a,b\n,1\n,2\n"),
        {"a": ["", ""], "b": [1, 2]},
        says=(NULL_IN_TEXT.format("a", "''"),),
    ),
    "dates": Odd(table("a,b\n2024-02-29,1\n"), {"a": ["2024-02-29"], "b": [1]}),
    "times": Odd(table("a,b\n2024-02-29T10:00:00Z,1\n"), {"a": ["2024-02-29T10:00:00Z"], "b": [1]}),
    "fractions": Odd(table("a,b\n.5,1e-05\n-2.50,1E3\n"), {"a": [0.5, -2.5], "b": [1e-05, 1000.0]}),
    "infinity": Odd(table("a,b\n1.5,1\ninf,2\n"), {"a": [1.5, float("inf")], "b": [1, 2]}),
    "too many digits": Odd(
        table("a,b\n0.12345678901234567890123,1\n"),
        {"a": ["0.12345678901234567890123"], "b": [1]},
        says=("`a` is text, as written: .* numbers",),
    ),
    "beyond float64": Odd(
        table("a,b\n1e400,1\n"), {"a": ["1e400"], "b": [1]}, says=("`a` is text, as written",)
    ),
    "2**53 + 1 among fractions": Odd(
        table("a,b\n0.5,1\n9007199254740993,2\n"),
        {"a": ["0.5", "9007199254740993"], "b": [1, 2]},
        says=("`a` is text",),
    ),
    "a plus": Odd(table("a,b\n+1,1\n"), {"a": ["+1"], "b": [1]}, says=("`a` is text",)),
    "hexadecimal": Odd(table("a,b\n0x1F,1\n"), {"a": ["0x1F"], "b": [1]}),
    "thousands": Odd(table('a,b\n"1,000",1\n'), {"a": ["1,000"], "b": [1]}),
    "a percent sign": Odd(table("a,b\n5%,1\n"), {"a": ["5%"], "b": [1]}),
    "yes and no": Odd(table("a,b\nyes,1\nno,2\n"), {"a": ["yes", "no"], "b": [1, 2]}),
    "truths": Odd(table("a,b\ntrue,True\nFALSE,false\n"), {"a": [True, False], "b": [True, False]}),
    "a truth and a number": Odd(table("a,b\ntrue,1\n1,2\n"), {"a": ["true", "1"], "b": [1, 2]}),
    "spaces around numbers": Odd(table("a,b\n 1 ,x\n"), {"a": [1], "b": ["x"]}),
    "spaces around texts": Odd(table("a,b\n x ,1\n"), {"a": [" x "], "b": [1]}),
    "a name of nothing": Odd(
        table("b,\nx,0\n"),
        {"b": ["x"], "": [0]},
        says=("a column has no name; `load_dataset` would call it `Unnamed: 1`",),
    ),
    "names with spaces": Odd(table("a b, c\n1,2\n"), {"a b": [1], " c": [2]}),
    "years as names": Odd(table("2023,2024\n1,2\n"), {"2023": [1], "2024": [2]}),
    "one column": Odd(table("a\n1\n2\n"), {"a": [1, 2]}),
    "a long cell": Odd(table(f"a,b\n{'x' * 300_000},1\n"), {"a": ["x" * 300_000], "b": [1]}),
    "many columns": Odd(
        table(",".join(f"c{i}" for i in range(2000)) + "\n" + ",".join("7" * 2000) + "\n"),
        {f"c{i}": [7] for i in range(2000)},
    ),
    "tabs": Odd({"a.tsv": b"a\tb\n1\tx,y\n"}, {"a": [1], "b": ["x,y"]}, how="csv"),
    "tabs, and commas in the names": Odd(
        {"A.TSV": b"a,c\tb\n1\tx,y\n"}, {"a,c": [1], "b": ["x,y"]}, how="csv"
    ),
    "semicolons and decimal commas": Odd(
        table("a;b\n1;2,5\n"), {"a": [1], "b": ["2,5"]}, separator=";"
    ),
    "bars": Odd(table("a|b\n1|x\n"), {"a": [1], "b": ["x"]}, separator="|"),
    "gzip": Odd({"a.csv.gz": gzip.compress(b"a,b\n1,2\n")}, {"a": [1], "b": [2]}, how="csv"),
    "Chinese": Odd(table("姓名,年龄\n王芳,31\n"), {"姓名": ["王芳"], "年龄": [31]}),
    "Russian": Odd(table("имя,возраст\nИван,31\n"), {"имя": ["Иван"], "возраст": [31]}),
    "digits of other scripts": Odd(table("a,b\n１２,1\n"), {"a": ["１２"], "b": [1]}),
    "emoji": Odd(table("a,b\n👩‍🚀,1\n"), {"a": ["👩‍🚀"], "b": [1]}),
    "columns in another order": Odd(
        {"1.csv": b"a,b\n1,x\n", "2.csv": b"b,a\ny,2\n"},
        {"a": [1, 2], "b": ["x", "y"]},
        how="csv",
    ),
    "types of two files": Odd(
        {"1.csv": b"a,b\n1,x\n", "2.csv": b"a,b\n0.5,y\n"},
        {"a": [1.0, 0.5], "b": ["x", "y"]},
        how="csv",
    ),
    "JSON lines": Odd(
        rows('{"a": 1, "b": "x"}', '{"a": 2, "b": null}'), {"a": [1, 2], "b": ["x", None]}
    ),
    "an array": Odd({"a.json": b'[{"a": 1},\n {"a": 2.5}]'}, {"a": [1.0, 2.5]}),
    "objects without lines": Odd({"a.json": b'{"a": 1}{"a": 2}'}, {"a": [1, 2]}),
    "an object over lines": Odd({"a.jsonl": b'{\n"a": 1\n}\n{"a": 2}'}, {"a": [1, 2]}),
    "BOM in JSON": Odd({"a.jsonl": b'\xef\xbb\xbf{"a": 1}'}, {"a": [1]}),
    "a late key": Odd(
        rows(*['{"a": 1}'] * 20_000, '{"a": 1, "b": "x"}'),
        {"a": [1] * 20_001, "b": [None] * 20_000 + ["x"]},
    ),
    "changing keys": Odd(
        rows('{"m": {"a": 1}}', '{"m": {"b": "x"}}'),
        {"m": [{"a": 1, "b": None}, {"a": None, "b": "x"}]},
    ),
    "chats with a tool": Odd(
        rows('{"m": [{"role": "user"}]}', '{"m": [{"role": "tool", "id": 7}]}'),
        {"m": [[{"role": "user", "id": None}], [{"role": "tool", "id": 7}]]},
    ),
    "texts of digits": Odd(rows('{"a": "007"}'), {"a": ["007"]}),
    "dates in JSON": Odd(
        rows('{"a": "2024-02-29"}', '{"a": null}'),
        {"a": ["2024-02-29", None]},
        says=("`a` is text, as written: '2024-02-29'; `load_dataset` would read dates",),
    ),
    "dates and words in JSON": Odd(
        rows('{"a": "2024-02-29"}', '{"a": "soon"}'), {"a": ["2024-02-29", "soon"]}
    ),
    "whole numbers, then fractions": Odd(rows('{"a": 1}', '{"a": 0.5}'), {"a": [1.0, 0.5]}),
    "null, then a list": Odd(rows('{"a": null}', '{"a": [1]}'), {"a": [None, [1]]}),
    "an empty list, then objects": Odd(
        rows('{"a": []}', '{"a": [{"b": 1}]}'), {"a": [[], [{"b": 1}]]}
    ),
    "nothing but null": Odd(rows('{"a": null, "b": 1}'), {"a": [None], "b": [1]}),
    "an escape for two": Odd(rows(r'{"a": "\ud83d\ude00"}'), {"a": ["😀"]}),
    "keys by case": Odd(rows('{"id": 1, "ID": 2}'), {"id": [1], "ID": [2]}),
    "Chinese JSON": Odd(rows('{"文字": "中国"}'), {"文字": ["中国"]}),
    "lines of text": Odd({"a.txt": b"\xef\xbb\xbfone\r\n\n two "}, {"text": ["one", "", " two "]}),
    "HTML as text": Odd({"a.txt": b"<html>\n"}, {"text": ["<html>"]}),
}

QUOTED = b'a,b\n"x, y",1\n'
REFUSED: dict[str, Odd] = {
    "too many cells": Odd(
        table("a,b\n1,2\nx, y,1\n"), says=("line 3 has 3: 'x, y,1'",), remedy={"a.csv": QUOTED}
    ),
    "too few cells": Odd(table("a,b\n1,2\n1\n"), says=("line 3 has 1: '1'",)),
    "trailing commas": Odd(
        table("a,b\n1,2,\n3,4,\n"),
        says=("line 2 has 3", "end with ','", "add it to the header"),
        remedy={"a.csv": b"a,b,\n1,2,\n3,4,\n"},
    ),
    "cells of a row with line ends": Odd(table('a,b\n"x\ny",2\n1\n'), says=("line 4 has 1: '1'",)),
    "an open quote": Odd(
        table('a,b\n1,2\n"x,2\n3,4\n'),
        says=("begins in line 3 has a quote that is never closed", "to line 4"),
        remedy={"a.csv": b'a,b\n1,2\n"x",2\n3,4\n'},
    ),
    "backslashes before quotes": Odd(
        table('a,b\n"say \\"hi\\"",2\n'),
        says=("line 2: a quoted cell continues", 'written twice \\(""\\)'),
        remedy={"a.csv": b'a,b\n"say ""hi""",2\n'},
    ),
    "semicolons": Odd(table("a;b\n1;2,5\n"), says=("cut at ';' it is 2: a, b", 'separator: ";"')),
    "tabs in a CSV": Odd(table("a\tb\n1\t2\n"), says=(r'separator: "\\t"',)),
    "a name twice": Odd(table("a,a\n1,2\n"), says=("two columns are called 'a'",)),
    "nothing": Odd(table(""), says=("it is empty", "Get it again")),
    "a NUL": Odd(table("a,b\nx\0,1\n"), says=("line 2 has a NUL byte",)),
    "other columns": Odd(
        {"1.csv": b"a,b\n1,2\n", "2.csv": b"a,c\n1,2\n"},
        says=("2.csv: it has the columns a, c; the files before it a, b",),
        how="csv",
    ),
    "GBK": Odd(
        table("姓名,年龄\n王芳,31\n李伟,28\n", "gbk"),
        says=(
            "line 1 is not UTF-8",
            "as GB18030 .* '姓名,年龄'",
            "iconv -f GB18030 -t UTF-8 a.csv",
        ),
        remedy=table("姓名,年龄\n王芳,31\n"),
    ),
    "CP1251": Odd(
        table("имя,возраст\nИван Петров,31\n", "cp1251"), says=("CP1251", "iconv -f CP1251")
    ),
    "GBK with its own punctuation": Odd(
        {"a.txt": "“你好”，世界。…\n".encode("gbk")}, says=("as GB18030",), how="text"
    ),
    "bytes of no language": Odd(
        {"a.csv": b"a,b\n\x81\x20\x81\x20,1\n"},
        says=("line 2 is not UTF-8 .byte 0x81., nor likely GB18030, CP1251, CP1252", "iconv"),
    ),
    "UTF-16": Odd(table("a,b\n1,2\n", "utf-16"), says=("it is UTF-16", "iconv -f UTF-16")),
    "UTF-16 without a mark": Odd(table("a,b\n1,2\n", "utf-16-le"), says=("it is UTF-16LE",)),
    "an Excel file": Odd(
        {"a.csv": b"PK\x03\x04\x14\0\x06\0"}, says=("Excel", "Save As, CSV UTF-8")
    ),
    "a page": Odd({"a.csv": b"<!DOCTYPE html><html>"}, says=("a page of the web",)),
    "numbers of 24 digits": Odd(
        rows('{"a": 1}', '{"a": 123456789012345678901234}'),
        says=(
            r"`a` is a whole number that does not fit 64 bits in a.jsonl, line 2 \(1234",
            "string",
        ),
        remedy=rows('{"a": "1"}', '{"a": "123456789012345678901234"}'),
    ),
    "2**53 + 1 and fractions in JSON": Odd(
        rows('{"a": 0.5}', '{"a": 9007199254740993}'), says=("line 1", "rounds in a.jsonl, line 2")
    ),
    "text and numbers": Odd(
        rows(*['{"a": 0}'] * 20_000, '{"a": "one"}'),
        says=(r'`a` is a whole number in a.jsonl, line 1 \(0\) and text .* line 20001 \("one"',),
    ),
    "text and numbers, in two files": Odd(
        {"1.jsonl": b'{"m": [{"id": 0}]}', "2.jsonl": b'\n{"m": [{"id": "x"}]}'},
        says=(r"`m\[\].id` is a whole number in 1.jsonl, line 1 .* text in 2.jsonl, line 2",),
        how="jsonl",
    ),
    "an object and a list": Odd(
        rows('{"a": {}}', '{"a": [1]}'), says=("an object in .* line 1", "a list in .* line 2")
    ),
    "true among fractions": Odd(
        rows('{"a": 1.5}', '{"a": true}'), says=("a fraction .* line 1", "true or false .* line 2")
    ),
    "half of a character": Odd(
        rows(r'{"a": "\ud83d"}'), says=("half of a character", "line 1", "Fix that")
    ),
    "1e400": Odd(rows('{"a": 1e400}'), says=("line 1: 1e400 is more than a float64 holds",)),
    "1e-400": Odd(rows('{"a": 0.0}', '{"a": 1e-400}'), says=("1e-400 is less than a float64",)),
    "a key twice": Odd(
        rows('{"b": 1}', '{"a": 1, "a": 2}'), says=("line 2: `a` is written twice",)
    ),
    "a comma too many": Odd(rows('{"b": 1}', '{"a": 1,}'), says=("line 2: not JSON",)),
    "single quotes": Odd(rows("{'a': 1}"), says=("line 1: not JSON",)),
    "an open string": Odd(rows('{"a": "x}', '{"a": "y"}'), says=("line 1: not JSON",)),
    "a torn array": Odd({"a.json": b'[{"a": 1},\n{"a": 2'}, says=("line 2: not JSON",)),
    "no comma": Odd({"a.json": b'[{"a": 1}\n{"a": 2}]'}, says=("line 2: between two values",)),
    "commas between lines": Odd(
        rows('{"a": 1},', '{"a": 2}'),
        says=("line 1: after an object comes a comma", "without commas between them"),
        remedy=rows('{"a": 1}', '{"a": 2}'),
    ),
    "an array a line": Odd(
        rows('[{"role": "user"}]', '[{"role": "user"}]'),
        says=("line 2: a second array begins",),
        remedy=rows('{"messages": [{"role": "user"}]}', '{"messages": [{"role": "user"}]}'),
    ),
    "a header that ends with a comma": Odd(
        table("id,size,\n1,2.5\n2,3.5\n"),
        says=("the header has 3 cells, but line 2 has 2", "header ends with ',': remove it there"),
        remedy=table("id,size\n1,2.5\n2,3.5\n"),
    ),
    "rows that are lists": Odd(
        rows('["a", 1]'),
        says=("line 1: after|line 1: a row is not an object",),
        remedy=rows('{"column": 1}'),
    ),
    "GBK in JSON": Odd(
        {"a.jsonl": '{"文字": "中国人民"}\n'.encode("gbk")}, says=("as GB18030", "iconv -f GB18030")
    ),
    "lists in lists, deeper than parquet goes": Odd(
        rows('{"a": ' + "[" * 200 + "]" * 200 + "}"), says=("cannot hold the column `a`",)
    ),
    "objects that are always empty": Odd(rows('{"a": 1, "m": {}}'), says=("every object in `m`",)),
}

Run = Callable[[Odd, dict[str, bytes], list[str]], dict[str, list[Any]]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    def run(odd: Odd, files: dict[str, bytes], notes: list[str]) -> dict[str, list[Any]]:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        for name, data in files.items():
            (folder / name).write_bytes(data)
        paths = {name: folder / name for name in files}
        ending = next(iter(files)).rpartition(".")[2]
        how = odd.how or {"txt": "text"}.get(ending, ending)
        out = folder / "out"
        with about("m.yaml:3: `x`"):
            made = convert(how, paths, splits_of_names, out, odd.separator, notes.append)
        assert sorted(out.iterdir()) == sorted(made["train"].shards), "only the parquet is left"
        columns: dict[str, list[Any]] = pq.read_table(made["train"].shards[0]).to_pydict()
        return columns

    return run


@pytest.mark.parametrize("name", FINE)
def test_it_has_exactly_these_values(run: Run, name: str) -> None:
    odd, notes = FINE[name], list[str]()
    found = run(odd, odd.files, notes)
    assert json.dumps(found) == json.dumps(odd.columns)  # 1 is not 1.0
    assert len(notes) == len(odd.says), notes
    for note, pattern in zip(notes, odd.says, strict=True):
        assert re.search(pattern, note), notes


@obeys("stage/convert/json_files.py", "Write each row as an object:", "Write one object a line")
@obeys("stage/convert/csv_files.py", "The header ends with")
@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_with_a_place_and_a_remedy_that_works(run: Run, name: str) -> None:
    odd = REFUSED[name]
    with pytest.raises(UsageError) as caught:
        run(odd, odd.files, [])
    said = f"{caught.value.message}\n{caught.value.remedy}"
    assert said.startswith("m.yaml:3: `x`: ") and caught.value.remedy
    assert list(odd.files)[-1] in said
    for pattern in odd.says:
        assert re.search(pattern, said), said
    if odd.remedy is not None:
        run(odd, odd.remedy, [])


@obeys("stage/convert/json_files.py", "Where each array is one row")
@pytest.mark.skipif(shutil.which("jq") is None, reason="jq is not installed")
def test_pages_of_rows_become_one_array_by_the_command_of_the_message(tmp_path: Path) -> None:
    """`gh api --paginate` writes an array per page; a talk per line looks the same."""
    (tmp_path / "a.json").write_bytes(b'[{"a": 1}]\n[{"a": 2}, {"a": 3}][]')
    with pytest.raises(UsageError, match="line 2: a second array begins") as caught:
        convert("json", {"a.json": tmp_path / "a.json"}, splits_of_names, tmp_path / "1")
    command = in_it(caught.value.remedy, "jq .*").replace("FILE", "a.json").replace("NEW", "b.json")
    subprocess.run(["sh", "-c", command], cwd=tmp_path, check=True)
    files = {"b.json": tmp_path / "b.json"}
    made = convert("json", files, splits_of_names, tmp_path / "2")
    assert pq.read_table(made["train"].shards[0]).to_pydict() == {"a": [1, 2, 3]}


@obeys("stage/convert/csv_files.py", "Remove that line")
def test_the_first_line_for_excel_is_not_the_header(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"sep=,\r\na,b\r\n1,2\r\n")
    with pytest.raises(UsageError, match="first line, 'sep=,', is a word to Excel") as caught:
        convert("csv", {"a.csv": tmp_path / "a.csv"}, splits_of_names, tmp_path / "1")
    command = (
        caught.value.remedy.partition(": ")[2].replace("FILE", "a.csv").replace("NEW", "b.csv")
    )
    subprocess.run(["sh", "-c", command], cwd=tmp_path, check=True)
    files = {"b.csv": tmp_path / "b.csv"}
    made = convert("csv", files, splits_of_names, tmp_path / "2")
    assert pq.read_table(made["train"].shards[0]).to_pydict() == {"a": [1], "b": [2]}
