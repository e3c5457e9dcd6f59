"""Files at an address or beside the manifest that are unpacked and converted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from click.testing import Result

from stage.bundle.bundle import Bundle
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
