"""Files at an address or beside the manifest that are unpacked and converted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
from click.testing import Result

from stage.bundle.bundle import Bundle
from tests.stage.convert.test_images import cifar
from tests.stage.staging.sources.conftest import archive, manifest, sha256
from tests.support.servers.web import Web


def test_an_archive_is_unpacked_repaired_and_fetched_again(
    stage: Callable[..., Result], web: Web
) -> None:
    web.files["/x.tar.gz"] = archive({"x/one.txt": b"one", "x/two.txt": b"two"})
    manifest(url=web.url("/x.tar.gz"), unpack=True)
    stage("fetch", "m.yaml", "-o", "b")
    bundle = Bundle.open(Path("b"))
    asset = bundle.asset("x")
    assert {f.origin: f.sha256 for f in asset.files} == {
        "x/one.txt": sha256(b"one"),
        "x/two.txt": sha256(b"two"),
    }
    assert asset.made_from[0].sha256 == sha256(web.files["/x.tar.gz"])
    assert asset.made_from[0].size == len(web.files["/x.tar.gz"]) and not list(
        Path("b").rglob("*.gz")
    )
    Path("b/data/files/x/x/one.txt").write_bytes(b"0ne")
    stage("verify", "b", code=1)
    stage("fetch", "m.yaml", "-o", "b")
    stage("verify", "b")
    assert Bundle.open(Path("b")).id == bundle.id
    stage("fetch", "m.yaml", "-o", "c")
    assert Bundle.open(Path("c")).id == bundle.id
    assert (
        json.loads(stage("show", "b", "--json").output)["assets"]["x"]["made_from"][0]["origin"]
        == asset.source.location
    )


def test_unpacked_and_converted(stage: Callable[..., Result], web: Web) -> None:
    web.files["/cifar-10-python.tar.gz"] = archive(cifar())
    manifest(url=web.url("/cifar-10-python.tar.gz"), unpack=True, convert="cifar")
    stage("fetch", "m.yaml", "-o", "b")
    asset = Bundle.open(Path("b")).asset("x")
    assert asset.kind == "dataset" and {
        s: split.rows for s, split in asset.configs["default"].items()
    } == {
        "train": 30,
        "test": 6,
    }
    assert [f.made_by for f in asset.files] == ["cifar", "cifar"] and len(asset.made_from) == 1
    stage("fetch", "m.yaml", "-o", "c")
    assert Bundle.open(Path("c")).id == Bundle.open(Path("b")).id


def test_a_csv_beside_the_manifest(stage: Callable[..., Result]) -> None:
    Path("prompts.csv").write_text("User,Prompt\na,b\n")
    manifest(path="prompts.csv", convert="csv")
    plan = stage("fetch", "m.yaml", "-o", "b", "--dry-run").output
    assert "make" in plan and not Path("b").exists()
    stage("fetch", "m.yaml", "-o", "b")
    asset = Bundle.open(Path("b")).asset("x")
    split = asset.configs["default"]["train"]
    assert split.rows == 1 and [(c.name, c.type) for c in split.schema or ()] == [
        ("User", "string"),
        ("Prompt", "string"),
    ]
    assert asset.made_from[0].sha256 == sha256(b"User,Prompt\na,b\n")
    assert pq.read_table(Path("b", split.shards[0])).to_pylist() == [{"User": "a", "Prompt": "b"}]
    Path("b", split.shards[0]).unlink()
    Path("prompts.csv").write_text("User,Prompt\na,c\n")
    assert "changed since m.lock was written" in stage("fetch", "m.yaml", "-o", "b", code=2).output
    stage("fetch", "m.yaml", "-o", "b", "--update", "x")
    assert pq.read_table(Path("b", split.shards[0])).column("Prompt").to_pylist() == ["c"]


def test_a_csv_that_is_no_table_is_told(stage: Callable[..., Result]) -> None:
    Path("a.csv").write_text("It was a dark night\nand it rained\n")
    manifest(path="a.csv", convert="csv")
    said = stage("fetch", "m.yaml", "-o", "a").output
    assert (
        "warning: x: default/train: one column, called 'It was a dark night'" in said
        and "`convert: text`" in said
    )
    Path("a.csv").write_text("It was a dark night\nand, of course, it rained\n")
    assert (
        "a row per line: convert: text"
        in stage("fetch", "m.yaml", "-o", "b", "--update", code=2).output
    )
    Path("a.csv").write_text("User,Prompt\n")
    said = stage("fetch", "m.yaml", "-o", "b", "--update", code=2).output
    assert (
        "not one row came out of 1 file" in said and not Path("b/tagmanifest-sha256.txt").exists()
    )
    Path("in").mkdir()
    Path("in/train.csv").write_text("a,b\n1,2\n")
    Path("in/test.csv").write_text("a,b\n")
    manifest(path="in", convert="csv")
    assert "warning: x: default/test: has no row" in stage("fetch", "m.yaml", "-o", "c").output
