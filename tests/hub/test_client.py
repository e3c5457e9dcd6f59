"""The real huggingface_hub client works with the Hub of the tests."""

from __future__ import annotations

from pathlib import Path

import pytest
import urllib3
from huggingface_hub import HfApi, set_client_factory
from huggingface_hub.errors import (
    EntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils._http import default_client_factory

from tests.support.servers.hubs import MEMBER_TOKEN, TestHub

WEIGHTS = bytes(range(256)) * 2000
FILES = {
    "README.md": b"---\nlicense: apache-2.0\nconfigs:\n- config_name: x\n"
    b'  data_files: "*.parquet"\n---\n# Tiny\n',
    "config.json": b'{"model_type": "bert"}\n',
    "model.safetensors": WEIGHTS,
    "onnx/config.json": b"{}",
}


@pytest.fixture(autouse=True)
def _own_client() -> None:
    """Undoes the effect of earlier tests: `stage` gives huggingface_hub a client for one Hub."""
    set_client_factory(default_client_factory)


def api(hub: TestHub, token: str | bool = False) -> HfApi:
    return HfApi(endpoint=hub.endpoint, token=token)


def fetch(
    hub: TestHub, path: str, folder: Path, token: str | bool = False, **options: str
) -> bytes:
    where = api(hub, token).hf_hub_download(
        "acme/tiny", path, cache_dir=folder / "cache", **options
    )
    return Path(where).read_bytes()


def test_branch_tag_slash_and_sha_lead_to_their_commits(hub: TestHub) -> None:
    first = hub.commit("models", "acme/tiny", FILES, tag="v1")
    second = hub.commit("models", "acme/tiny", {**FILES, "config.json": b"{}"})
    third = hub.commit("models", "acme/tiny", {"a": b""}, ref="refs/heads/feature/x")
    expected = {"main": second, "v1": first, "feature/x": third, first: first}
    assert {
        name: api(hub).model_info("acme/tiny", revision=name).sha for name in expected
    } == expected
    refs = api(hub).list_repo_refs("acme/tiny")
    assert {b.name: b.target_commit for b in refs.branches} == {"main": second, "feature/x": third}
    assert {t.name: t.target_commit for t in refs.tags} == {"v1": first}


def test_commit_shas_are_those_of_git(hub: TestHub) -> None:
    first = hub.commit(
        "models", "acme/tiny", {"config.json": b"{}", "model.safetensors": b"weights"}
    )
    second = hub.commit("models", "acme/tiny", {"config.json": b"{}", "a/b": b"x"})
    assert first == "8419268766690a589e8cc57d74a8eb49f244f790"
    assert second == "8661fc190d2fee315fc17c5fdc3b06c6f6fe0c05"


def test_missing_things_have_different_errors(hub: TestHub, tmp_path: Path) -> None:
    hub.commit("models", "acme/tiny", FILES)
    with pytest.raises(RepositoryNotFoundError):
        api(hub).model_info("acme/nothing")
    with pytest.raises(RepositoryNotFoundError):
        api(hub, MEMBER_TOKEN).model_info("acme/nothing")
    with pytest.raises(RevisionNotFoundError):
        api(hub).model_info("acme/tiny", revision="v9")
    with pytest.raises(EntryNotFoundError):
        fetch(hub, "nothing.json", tmp_path)


def get(url: str, method: str = "GET", **headers: str) -> urllib3.BaseHTTPResponse:
    return urllib3.request(method, url, headers=headers, redirect=False, retries=False, timeout=30)


def cdn_url(hub: TestHub) -> str:
    return get(f"{hub.endpoint}/acme/tiny/resolve/main/model.safetensors", "HEAD").headers[
        "location"
    ]


@pytest.mark.parametrize(
    ("asked", "first", "last"),
    [("bytes=0-9", 0, 9), ("bytes=511990-", 511990, 511999), ("bytes=-3", 511997, 511999)],
)
def test_ranges_are_served(hub: TestHub, asked: str, first: int, last: int) -> None:
    hub.commit("models", "acme/tiny", FILES)
    answer = get(cdn_url(hub), Range=asked)
    assert (answer.status, answer.data) == (206, WEIGHTS[first : last + 1])
    assert answer.headers["content-range"] == f"bytes {first}-{last}/{len(WEIGHTS)}"
    assert get(cdn_url(hub), Range="bytes=512000-").status == 416


def received(url: str) -> bytes:
    """The bytes that arrive before the connection breaks."""
    data = b""
    with pytest.raises(urllib3.exceptions.HTTPError):
        answer = urllib3.request("GET", url, preload_content=False, retries=False, timeout=0.5)
        while chunk := answer.read(1000):
            data += chunk
    return data


@pytest.mark.parametrize(
    "fault",
    [{"drop_after": 100_000}, {"stall_after": 100_000, "stall_s": 30}],
    ids=["cut", "stalled"],
)
def test_a_body_breaks_at_the_byte_asked_for(hub: TestHub, fault: dict[str, int]) -> None:
    hub.commit("models", "acme/tiny", FILES)
    hub.faults.add(side="cdn", path=r"model\.safetensors$", times=1, **fault)
    assert received(cdn_url(hub)) == WEIGHTS[:100_000]
    assert get(cdn_url(hub)).data == WEIGHTS
