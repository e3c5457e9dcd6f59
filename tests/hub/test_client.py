"""The real huggingface_hub client works with the Hub of the tests."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest
import urllib3
from huggingface_hub import HfApi, set_client_factory
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoFile, RepoFolder
from huggingface_hub.utils._http import default_client_factory

from tests.support.servers.hubs import MEMBER_TOKEN, STRANGER_TOKEN, TestHub

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


def test_info_tells_the_licence_and_every_file(hub: TestHub) -> None:
    hub.commit("models", "acme/tiny", FILES)
    info = api(hub).model_info("acme/tiny")
    assert info.card_data is not None and info.card_data["license"] == "apache-2.0"
    assert info.card_data["configs"][0]["data_files"] == "*.parquet"
    assert "license:apache-2.0" in (info.tags or ())
    assert {s.rfilename for s in info.siblings or ()} == {*FILES, ".gitattributes"}


def test_a_listing_gives_upstream_digests_page_by_page(hub_factory: Callable[..., TestHub]) -> None:
    hub = hub_factory(page_size=2)
    hub.commit("datasets", "acme/tiny", FILES)
    tree = {
        entry.path: entry
        for entry in api(hub).list_repo_tree("acme/tiny", recursive=True, repo_type="dataset")
    }
    assert set(tree) == {*FILES, ".gitattributes", "onnx"}
    weights, config = tree["model.safetensors"], tree["config.json"]
    assert (
        isinstance(weights, RepoFile)
        and isinstance(config, RepoFile)
        and isinstance(tree["onnx"], RepoFolder)
    )
    assert weights.lfs is not None and weights.lfs.sha256 == hashlib.sha256(WEIGHTS).hexdigest()
    data = FILES["config.json"]
    assert (
        config.lfs is None
        and config.blob_id == hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    )
    assert len(hub.requests("/tree/")) == 3


def test_files_arrive_by_their_two_roads(hub: TestHub, tmp_path: Path) -> None:
    hub.commit("models", "acme/tiny", FILES)
    for path in ("config.json", "model.safetensors", "onnx/config.json"):
        assert fetch(hub, path, tmp_path) == FILES[path]
    assert [r.file for r in hub.requests(side="cdn")] == ["models/acme/tiny/model.safetensors"]


def test_refs_convert_parquet_is_a_revision(hub: TestHub) -> None:
    hub.commit("datasets", "acme/tiny", {"data.csv": b"a\n1\n"})
    sha = hub.commit(
        "datasets", "acme/tiny", {"default/train/0000.parquet": b"PAR1"}, ref="refs/convert/parquet"
    )
    assert api(hub).dataset_info("acme/tiny", revision="refs/convert/parquet").sha == sha
    names = api(hub).list_repo_files(
        "acme/tiny", repo_type="dataset", revision="refs/convert/parquet"
    )
    assert "default/train/0000.parquet" in names


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


def test_gated_files_open_only_for_members(hub: TestHub, tmp_path: Path) -> None:
    hub.commit("models", "acme/tiny", FILES)
    hub.configure("models", "acme/tiny", gated="manual", members=("tester",))
    assert api(hub).model_info("acme/tiny").gated == "manual"
    for token in (False, STRANGER_TOKEN):
        with pytest.raises(GatedRepoError):
            fetch(hub, "config.json", tmp_path, token)
    assert fetch(hub, "config.json", tmp_path, MEMBER_TOKEN) == FILES["config.json"]


def test_a_private_repository_is_not_there_for_strangers(hub: TestHub) -> None:
    hub.commit("models", "acme/tiny", FILES)
    hub.configure("models", "acme/tiny", private=True, members=("tester",))
    for token in (False, STRANGER_TOKEN):
        with pytest.raises(RepositoryNotFoundError):
            api(hub, token).model_info("acme/tiny")
    assert api(hub, MEMBER_TOKEN).model_info("acme/tiny").private
    with pytest.raises(HfHubHTTPError, match="401"):
        api(hub, "hf_wrong").model_info("acme/tiny")


def test_an_old_name_leads_to_the_new_one(hub: TestHub) -> None:
    sha = hub.commit("models", "acme/tiny", FILES)
    hub.configure("models", "tiny", moved_to="acme/tiny")
    info = api(hub).model_info("tiny")
    assert (info.id, info.sha) == ("acme/tiny", sha)


def test_the_client_keeps_its_token_from_the_cdn(hub: TestHub, tmp_path: Path) -> None:
    hub.commit("models", "acme/tiny", FILES)
    fetch(hub, "model.safetensors", tmp_path, MEMBER_TOKEN)
    assert [r.token for r in hub.requests(side="cdn")] == [False]
    assert all(r.token for r in hub.requests(side="hub"))


def get(url: str, method: str = "GET", **headers: str) -> urllib3.BaseHTTPResponse:
    return urllib3.request(method, url, headers=headers, redirect=False, retries=False, timeout=30)


def cdn_url(hub: TestHub) -> str:
    return get(f"{hub.endpoint}/acme/tiny/resolve/main/model.safetensors", "HEAD").headers[
        "location"
    ]


def test_a_cdn_address_expires_and_cannot_be_forged(hub_factory: Callable[..., TestHub]) -> None:
    hub = hub_factory(cdn_ttl=-5)
    hub.commit("models", "acme/tiny", FILES)
    assert get(cdn_url(hub)).status == 403
    lasting = hub_factory(cdn_ttl=60)
    lasting.commit("models", "acme/tiny", FILES)
    assert get(cdn_url(lasting)).status == 200
    assert get(cdn_url(lasting)[:-1] + "#").status == 403


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


@pytest.mark.parametrize(
    "fault", [{"drop_after": 1000, "reset": True}, {"close": True}], ids=["reset", "closed"]
)
def test_a_connection_ends_early(hub: TestHub, fault: dict[str, int]) -> None:
    hub.commit("models", "acme/tiny", FILES)
    hub.faults.add(side="cdn", times=1, skip=1, **fault)
    url = cdn_url(hub)
    assert get(url).data == WEIGHTS
    assert len(received(url)) <= 1000
    assert get(url).data == WEIGHTS


def test_bytes_are_flipped_and_files_cut_short(hub: TestHub) -> None:
    hub.commit("models", "acme/tiny", FILES)
    hub.faults.add(side="cdn", times=2, corrupt_at=70_000)
    hub.faults.add(side="cdn", times=1, truncate_to=10)
    hub.faults.add(side="cdn", times=1, ignore_range=True)
    url = cdn_url(hub)
    flipped = get(url).data
    assert [n for n, (a, b) in enumerate(zip(flipped, WEIGHTS, strict=True)) if a != b] == [70_000]
    part = get(url, Range="bytes=69999-70001").data
    assert part[1] != WEIGHTS[70_000] and (part[0], part[2]) == (WEIGHTS[69_999], WEIGHTS[70_001])
    assert get(url).data == WEIGHTS[:10]
    assert get(url, Range="bytes=5-").data == WEIGHTS


def test_any_answer_can_be_another(hub: TestHub) -> None:
    hub.commit("models", "acme/tiny", FILES)
    hub.faults.add(
        side="hub",
        path="^/api/models/",
        times=1,
        status=429,
        headers={"Retry-After": "7"},
        body="slow",
    )
    answer = get(f"{hub.endpoint}/api/models/acme/tiny/revision/main")
    assert (answer.status, answer.headers["retry-after"], answer.data) == (429, "7", b"slow")
    assert get(f"{hub.endpoint}/api/models/acme/tiny/revision/main").status == 200


def test_the_log_tells_what_was_asked_and_how_much_was_sent(hub: TestHub) -> None:
    hub.commit("models", "acme/tiny", FILES)
    get(cdn_url(hub), Range="bytes=100-")
    (row,) = hub.requests(side="cdn")
    assert (row.method, row.range, row.status, row.sent) == (
        "GET",
        "bytes=100-",
        206,
        len(WEIGHTS) - 100,
    )
    assert row.file == "models/acme/tiny/model.safetensors"
    hub.forget_requests()
    assert hub.requests() == []
