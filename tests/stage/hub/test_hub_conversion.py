"""Datasets on the Hub without parquet: converted here and pinned per file, or clearly refused."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import Result

from stage.bundle.bundle import Bundle
from tests.stage.hub.raw_dataset import ID, arrow, card, manifest, rows
from tests.support.servers.hubs import TestHub

LINES = {
    "README.md": card(
        license="mit", dataset_info={"splits": [{"name": "train", "num_examples": 3}]}
    ),
    "train-2.jsonl": b'{"t": "b", "n": 2}\n',
    "train-10.jsonl": b'{"t": "c", "n": 2.5}\n',
    "train-1.jsonl": b'{"t": "a", "n": 1}\n',
    "test.jsonl.gz": gzip.compress(b'{"t": "d", "n": 4}\n'),
    "extra.py": b"print()",
}


def test_another_machine_makes_the_same_bundle_and_a_repair_the_same_bytes(
    hub: TestHub, stage: Callable[..., Result]
) -> None:
    hub.commit("datasets", ID, LINES)
    manifest(splits=["train"])
    stage("fetch", "m.yaml", "-o", "b")
    bundle = Bundle.open(Path("b"))
    assert (
        list(bundle.asset("raw").configs["default"]) == ["train"]
        and len(bundle.asset("raw").made_from) == 3
    )
    hub.forget_requests()
    stage("fetch", "m.yaml", "-o", "b")
    assert not hub.requests(r"\.jsonl")
    stage("fetch", "m.yaml", "-o", "other", "--locked")
    assert Bundle.open(Path("other")).id == bundle.id
    (shard,) = Path("b").rglob("*.parquet")
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    stage("fetch", "m.yaml", "-o", "b")
    assert Bundle.open(Path("b")).id == bundle.id and not Path("b/workshop.partial").exists()
    stage("verify", "b")
    hub.forget_requests()
    stage("fetch", "m.yaml", "-o", "b", "--update")
    assert Bundle.open(Path("b")).id == bundle.id and not hub.requests(r"\.jsonl")


def test_rows_are_those_the_card_declares(hub: TestHub, stage: Callable[..., Result]) -> None:
    hub.commit(
        "datasets", ID, {**LINES, "train-2.jsonl": b'{"t": "b", "n": 2}\n{"t": "b", "n": 2}\n'}
    )
    manifest()
    assert "the card says 3" in stage("fetch", "m.yaml", "-o", "b", code=1).output


FORMATS: dict[str, tuple[dict[str, bytes], dict[str, list[dict[str, Any]]]]] = {
    "jsonl in the order of its numbers": (
        LINES,
        {
            "test": [{"t": "d", "n": 4.0}],
            "train": [{"t": "a", "n": 1.0}, {"t": "b", "n": 2.0}, {"t": "c", "n": 2.5}],
        },
    ),
    "csv and tsv": (
        {"a.csv": b"x,y\n1,a\n", "b.tsv": b"x\ty\n2\tb\n"},
        {"train": [{"x": 1, "y": "a"}, {"x": 2, "y": "b"}]},
    ),
    "json": ({"dev.json": b'[{"x": 1},\n {"x": 2}]'}, {"validation": [{"x": 1}, {"x": 2}]}),
    "compressed": (
        {
            "train.jsonl.zst": pa.compress(b'{"x": 1}\n{"x": 2}\n', "zstd", asbytes=True),
            "test.jsonl.gz": gzip.compress(b'{"x": 3}\n'),
        },
        {"train": [{"x": 1}, {"x": 2}], "test": [{"x": 3}]},
    ),
    "text": (
        {"data/train.txt": b"one\ntwo\n", "LICENSE": b"x"},
        {"train": [{"text": "one"}, {"text": "two"}]},
    ),
    "save_to_disk": (
        {
            "dataset_dict.json": b'{"splits": ["train"]}',
            "train/data-00000-of-00001.arrow": arrow(pa.table({"x": [1, None]})),
            "train/state.json": b'{"_fingerprint": "x"}',
            "train/dataset_info.json": b"{}",
        },
        {"train": [{"x": 1}, {"x": None}]},
    ),
    "separator in the card": (
        {
            "README.md": card(
                configs=[{"config_name": "default", "data_files": "*.csv", "sep": ";"}]
            ),
            "a.csv": b"x;y\n1;2,5\n",
        },
        {"train": [{"x": 1, "y": "2,5"}]},
    ),
    "images": (
        {
            "train/metadata.csv": b"file_name,n\n1.png,7\n",
            "train/1.png": b"PNG",
            "train/2%.png": b"PNG2",
        },
        {"train": [{"image": {"bytes": b"PNG", "path": "1.png"}, "n": 7}]},
    ),
    "one file in two splits": (
        {
            "README.md": card(
                configs=[
                    {
                        "config_name": "default",
                        "data_files": [
                            {"split": "train", "path": "a.csv"},
                            {"split": "all", "path": ["a.csv", "b.csv"]},
                        ],
                    }
                ]
            ),
            "a.csv": b"x\n1\n",
            "b.csv": b"x\n2\n",
        },
        {"train": [{"x": 1}], "all": [{"x": 1}, {"x": 2}]},
    ),
    "names equal but for case": (
        {"train/a.csv": b"x\n1\n", "train/A.csv": b"x\n2\n"},
        {"train": [{"x": 2}, {"x": 1}]},
    ),
}


def test_a_separator_that_no_card_names_is_named_by_the_manifest(
    hub: TestHub, stage: Callable[..., Result]
) -> None:
    hub.commit("datasets", ID, {"a.csv": b"x;y\n1;2,5\n"})
    manifest()
    assert 'separator: ";"' in stage("fetch", "m.yaml", "-o", "b", code=2).output
    manifest(separator=";")
    stage("fetch", "m.yaml", "-o", "b")
    assert rows("train") == [{"x": 1, "y": "2,5"}]
    hub.commit("datasets", ID, {"a.jsonl": b'{"x": 1}\n'})
    assert "is not made from CSV files" in stage("lock", "m.yaml", "--update", code=2).output


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_arrives(hub: TestHub, stage: Callable[..., Result], name: str) -> None:
    files, expected = FORMATS[name]
    hub.commit("datasets", ID, files)
    manifest()
    stage("fetch", "m.yaml", "-o", "b")
    assert {
        split: rows(split) for split in Bundle.open(Path("b")).asset("raw").configs["default"]
    } == expected


def parquet(rows: list[dict[str, Any]]) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), sink)
    return sink.getvalue()


def test_what_the_hub_converted_in_part_is_made_whole_here(
    hub: TestHub, stage: Callable[..., Result]
) -> None:
    hub.commit("datasets", ID, LINES)
    part = {"default/partial-train/0000.parquet": parquet([{"t": "a part"}])}
    hub.commit("datasets", ID, part, ref="refs/convert/parquet")
    manifest()
    stage("fetch", "m.yaml", "-o", "b")
    assert len(rows("train")) == 3


REFUSED: dict[str, tuple[dict[str, bytes], int, str]] = {
    "a loading script": (
        {"raw.py": b"import datasets", "data.csv": b"a\n1\n"},
        3,
        r"generated by its own code (raw.py)",
    ),
    "archives": ({"a.tar": b"", "b.tar": b""}, 2, "its files are WebDataset"),
    "an option of the card": (
        {
            "README.md": card(
                configs=[{"config_name": "default", "data_files": "a.csv", "header": 3}]
            ),
            "a.csv": b"a\n",
        },
        2,
        "its card asks for `header: 3`",
    ),
    "nothing": ({"README.md": b"# empty"}, 2, "nor files that could be converted"),
    "a shard is missing": (
        {"data/train-00000-of-00002.jsonl": b"{}\n"},
        2,
        "has 1 of 2 files; number 1 is missing",
    ),
    "a split that leads out": (
        {
            "README.md": card(
                configs=[
                    {
                        "config_name": "c",
                        "data_files": [{"split": "../../../../evil", "path": "a.csv"}],
                    }
                ]
            ),
            "a.csv": b"a\n1\n",
        },
        3,
        "cannot name a split",
    ),
    "a config that leads out": (
        {
            "README.md": card(configs=[{"config_name": "../../../evil", "data_files": "a.csv"}]),
            "a.csv": b"a\n1\n",
        },
        3,
        "`..`",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_taken_is_said_before_anything_is_fetched(
    hub: TestHub, stage: Callable[..., Result], name: str
) -> None:
    files, code, said = REFUSED[name]
    hub.commit("datasets", ID, files)
    manifest()
    output = stage("lock", "m.yaml", code=code).output
    assert said in output and "m.yaml:1" in output and not Path("m.lock").exists()


@pytest.mark.parametrize("field", ["split", "config"])
def test_a_lock_cannot_lead_what_is_made_out_of_the_bundle(
    hub: TestHub, stage: Callable[..., Result], field: str
) -> None:
    hub.commit("datasets", ID, LINES)
    manifest()
    stage("lock", "m.yaml")
    lock = json.loads(Path("m.lock").read_text())
    asset = lock["assets"]["raw"]
    if field == "split":
        for ingredient in asset["made_from"]:
            ingredient["split"] = "../../../../evil"
    else:
        asset["configs"] = {"../../../../evil": asset["configs"]["default"]}
    Path("m.lock").write_text(json.dumps(lock))
    stage("fetch", "m.yaml", "-o", "b", code=2 if field == "split" else 3)
    assert not list(Path("..").rglob("*evil*"))


def test_an_original_that_is_not_as_announced_is_refused(
    hub: TestHub, stage: Callable[..., Result]
) -> None:
    hub.commit("datasets", ID, LINES)
    manifest()
    hub.faults.add(path=r"train-2\.jsonl$", corrupt_at=3)
    said = stage("fetch", "m.yaml", "-o", "b", code=1).output
    assert (
        "train-2.jsonl" in said
        and "git-sha1" in said
        and not Path("b/tagmanifest-sha256.txt").exists()
    )
