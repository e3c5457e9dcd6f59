"""Files too large for plain HTTP come from the Xet store: by the real hf_xet, from a local store.

No live store was used: the Hub's answers here (the announced hash, the token) have the form that
huggingface_hub reads.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import Result

from stage.download import xet
from stage.download.retry import AttemptFailed
from stage.download.xet import XetFile, XetStore, is_for_xet
from stage.errors import UsageError
from stage.installation import install_command
from tests.support.servers.hubs import TestHub
from tests.support.servers.web import Web, serve
from tests.support.staging import safetensors

LIMIT = 1_000_000
WEIGHTS = safetensors(3_000_000)


@pytest.fixture
def web() -> Iterator[Web]:
    with serve() as started:
        yield started


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub_factory: object) -> Path:
    """The folder of the store; nothing is written to the user's home."""
    monkeypatch.setenv("HF_XET_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_XET_LOG_DEST", str(tmp_path / "logs"))
    return tmp_path / "xet"


def upload(store: Path, data: bytes) -> str:
    """Puts bytes into a local store; returns their Xet hash."""
    import hf_xet

    commit = hf_xet.XetSession().new_upload_commit(endpoint=f"local://{store}")
    commit.start_upload_bytes(data, name="x")
    (uploaded,) = commit.wait_to_finish().uploads.values()
    return str(uploaded.xet_info.hash)


def announce(hub: TestHub, web: Web, store: Path, hash: str) -> None:
    """The Hub announces that the weights are in the store, and where to get a token for it."""
    token = {"accessToken": "x", "exp": int(time.time()) + 3600, "casUrl": f"local://{store}"}
    web.files["/token"] = json.dumps(token).encode()
    headers = {
        "X-Xet-Hash": hash,
        "X-Xet-Refresh-Route": web.url("/token"),
        "ETag": '"x"',
        "Content-Length": "0",
    }
    hub.faults.add(
        side="hub", method="HEAD", path=r"model\.safetensors$", status=200, headers=headers
    )


@pytest.fixture
def large(hub: TestHub, monkeypatch: pytest.MonkeyPatch) -> TestHub:
    """A Hub with a model whose weights are above the limit, which is lower here."""
    monkeypatch.setattr(xet, "PLAIN_HTTP_LIMIT", LIMIT)
    hub.commit(
        "models",
        "acme/large",
        {"config.json": b'{"model_type": "bert"}', "model.safetensors": WEIGHTS},
    )
    Path("m.yaml").write_text("format: 1\nassets: {large: {model: acme/large}}\n")
    return hub


def test_a_file_above_the_limit_comes_from_the_store(
    stage: Callable[..., Result], large: TestHub, web: Web, store: Path
) -> None:
    announce(large, web, store, upload(store, WEIGHTS))
    large.faults.add(side="cdn", path=r"model\.safetensors$", status=403)
    said = stage("fetch", "m.yaml", "-o", "b").output
    assert "model.safetensors: from the Hub's Xet store" in said and "config.json: from" not in said
    assert Path("b/data/models/large/model.safetensors").read_bytes() == WEIGHTS
    assert ("/token", None) in web.requests and not large.requests(side="cdn")
    stage("verify", "b")


def test_it_resumes_where_an_earlier_run_stopped(
    stage: Callable[..., Result],
    large: TestHub,
    web: Web,
    store: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    announce(large, web, store, upload(store, WEIGHTS))
    stage("lock", "m.yaml")
    (file,) = [
        f
        for f in json.loads(Path("m.lock").read_text())["assets"]["large"]["files"]
        if "safetensors" in f["path"]
    ]
    left = Path("b/data/models/large") / f"model.safetensors.{file['sha256'][:12]}.partial"
    left.parent.mkdir(parents=True)
    left.write_bytes(WEIGHTS[:2_000_000])
    Path("b/fetch.partial").write_text(f"{file['path']}\n")
    starts = []
    opened = XetFile.open
    monkeypatch.setattr(
        XetFile,
        "open",
        lambda self, offset, version: starts.append(offset) or opened(self, offset, version),
    )
    stage("fetch", "m.yaml", "-o", "b")
    assert starts == [2_000_000] and (left.parent / "model.safetensors").read_bytes() == WEIGHTS


def test_other_bytes_than_announced_are_refused(
    stage: Callable[..., Result], large: TestHub, web: Web, store: Path
) -> None:
    announce(large, web, store, upload(store, WEIGHTS[:-1] + b"x"))
    assert "lfs-sha256" in stage("fetch", "m.yaml", "-o", "b", code=1).output
    assert not Path("b/data/models/large/model.safetensors").exists()


def test_what_no_store_is_announced_for_comes_over_http(
    stage: Callable[..., Result], large: TestHub
) -> None:
    said = stage("fetch", "m.yaml", "-o", "b").output
    assert (
        "Xet" not in said and Path("b/data/models/large/model.safetensors").read_bytes() == WEIGHTS
    )


def test_a_small_file_never_touches_the_store(
    stage: Callable[..., Result],
    large: TestHub,
    web: Web,
    store: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    announce(large, web, store, "0" * 64)
    monkeypatch.setattr(xet, "PLAIN_HTTP_LIMIT", 50 * 10**9)
    stage("fetch", "m.yaml", "-o", "b")
    assert not web.requests and large.requests(side="cdn")


@pytest.mark.parametrize(
    ("size", "setting", "expected"),
    [
        (50 * 10**9, None, False),
        (50 * 10**9 + 1, None, True),
        (10**12, "1", False),
        (10**12, "0", True),
    ],
)
def test_which_files_are_for_the_store(
    monkeypatch: pytest.MonkeyPatch,
    size: int,
    setting: str | None,
    expected: bool,
    hub_factory: object,
) -> None:
    monkeypatch.delenv("HF_HUB_DISABLE_XET", raising=False)
    if setting is not None:
        monkeypatch.setenv("HF_HUB_DISABLE_XET", setting)
    assert is_for_xet(size) is expected


def file_in(web: Web, hash: str, size: int) -> XetFile:
    return XetFile(XetStore(2.0), "x", hash, size, web.url("/token"), web.url(""), "hf_secret")


def test_any_offset_gives_the_rest_of_the_file(web: Web, store: Path) -> None:
    data = random.Random(1).randbytes(5_000_000)
    hash = upload(store, data)
    token = {"accessToken": "x", "exp": int(time.time()) + 3600, "casUrl": f"local://{store}"}
    web.files["/token"] = json.dumps(token).encode()
    file = file_in(web, hash, len(data))
    assert file.probe() == (len(data), hash)
    for offset in (0, 1, 65_536, 4_999_999):
        with file.open(offset, hash) as stream:
            assert stream.offset == offset and b"".join(stream.pieces) == data[offset:]


def test_a_store_that_does_not_answer_is_in_words(web: Web, store: Path) -> None:
    with (
        pytest.raises(AttemptFailed, match="Xet store"),
        file_in(web, "0" * 64, 5).open(0, None) as stream,
    ):
        list(stream.pieces)
    token = {"accessToken": "x", "exp": int(time.time()) + 3600, "casUrl": f"local://{store}"}
    web.files["/token"] = json.dumps(token).encode()
    with (
        pytest.raises(AttemptFailed, match="hash"),
        file_in(web, "no hash", 5).open(0, None) as stream,
    ):
        list(stream.pieces)


def test_the_token_goes_to_the_hub_alone(hub_factory: object) -> None:
    for refresh, expected in (
        ("https://hub/api/token", {"Authorization": "Bearer t"}),
        ("https://other/token", {}),
    ):
        assert (
            XetFile(XetStore(2.0), "x", "0" * 64, 5, refresh, "https://hub", "t")._headers
            == expected
        )


def test_without_hf_xet_it_is_said_what_to_install(
    monkeypatch: pytest.MonkeyPatch, web: Web, hub_factory: object
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "hf_xet", None)
    with (
        pytest.raises(UsageError, match="hf_xet") as refusal,
        file_in(web, "0" * 64, 5).open(0, None),
    ):
        raise AssertionError
    assert refusal.value.remedy == install_command("xet")
