"""Sixty calls of huggingface_hub, as people's scripts make them; prints what each gives, as JSON.

Runs in each client's own Python, so it imports nothing of this repository. Dates, commit titles and
the ids of folders are left out: a bundle does not have them.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from huggingface_hub import (
    HfApi,
    HfFileSystem,
    constants,
    get_hf_file_metadata,
    hf_hub_download,
    hf_hub_url,
    snapshot_download,
)

MODEL, OLD, DATASET, COMMIT = sys.argv[1:5]
PARQUET = "plain/validation-00000-of-00001.parquet"
HIDDEN = {".gitattributes"}  # the Hub's own, which some bundles leave out
api, files = HfApi(), HfFileSystem()


def digest(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]


def entry(item: Any) -> list[Any]:
    lfs = getattr(item, "lfs", None)
    if not hasattr(item, "size"):
        return [item.path]
    return [item.path, item.size, item.blob_id, lfs["sha256"] if lfs else None]


def entries(items: Any) -> list[list[Any]]:
    return sorted((entry(item) for item in items if item.path not in HIDDEN), key=str)


def names(paths: Any) -> list[str]:
    return sorted(path for path in paths if path.rpartition("/")[2] not in HIDDEN)


def fetched(name: str = MODEL, path: str = "config.json", **more: Any) -> str:
    return digest(hf_hub_download(name, path, **more))


def snapshot(**more: Any) -> list[str]:
    root = Path(snapshot_download(MODEL, **more))
    return names(p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file())


def metadata(path: str, revision: str = "main") -> list[Any]:
    found = get_hf_file_metadata(hf_hub_url(MODEL, path, revision=revision))
    return [found.commit_hash, found.etag, found.size]


def read(path: str, start: int = 0, length: int = -1) -> str:
    with files.open(f"{MODEL}/{path}", "rb") as file:
        file.seek(start)
        return hashlib.sha256(file.read(length)).hexdigest()[:16]


def raw(path: str, **headers: str) -> list[Any]:
    request = urllib.request.Request(f"{constants.ENDPOINT}/{MODEL}/{path}", headers=headers)
    with urllib.request.urlopen(request) as answer:
        return [answer.status, hashlib.sha256(answer.read()).hexdigest()[:16]]


def info(path: str) -> list[Any]:
    found = files.info(f"{MODEL}/{path}")
    return [found["name"], found["type"], found["size"]]


def told(**more: Any) -> list[Any]:
    found = api.model_info(MODEL, **more)
    siblings = found.siblings or []
    rows = [[s.rfilename, s.size, s.blob_id] for s in siblings if s.rfilename not in HIDDEN]
    return [found.id, found.sha, sorted(rows)]


def listed(**more: Any) -> list[str]:
    return sorted(found.id for found in api.list_models(**more))


CALLS: list[tuple[str, Callable[[], Any]]] = [
    ("model_info", told),
    ("model_info with files", lambda: told(files_metadata=True)),
    ("model_info of a commit", lambda: told(revision=COMMIT)),
    ("model_info of an unknown revision", lambda: told(revision="v9")),
    ("model_info of an unknown repository", lambda: api.model_info("acme/none").id),
    ("model_info of an old name", lambda: api.model_info(OLD).id),
    ("model_info expanded", lambda: told(expand=["sha", "siblings"])),
    ("its author and flags", lambda: _flags(api.model_info(MODEL))),
    ("its licence tag", lambda: "license:apache-2.0" in (api.model_info(MODEL).tags or [])),
    ("its card", lambda: (api.model_info(MODEL).card_data or {}).get("license")),
    ("dataset_info", lambda: api.dataset_info(DATASET).sha),
    ("repo_info", lambda: api.repo_info(DATASET, repo_type="dataset").id),
    ("space_info of none", lambda: api.space_info("acme/none").id),
    ("files", lambda: names(api.list_repo_files(MODEL))),
    ("files of an old name", lambda: names(api.list_repo_files(OLD))),
    ("files of a commit", lambda: names(api.list_repo_files(MODEL, revision=COMMIT))),
    ("tree", lambda: entries(api.list_repo_tree(MODEL))),
    ("tree, recursive", lambda: entries(api.list_repo_tree(MODEL, recursive=True))),
    ("tree, expanded", lambda: entries(api.list_repo_tree(MODEL, expand=True))),
    ("tree of a folder", lambda: entries(api.list_repo_tree(MODEL, "onnx"))),
    ("tree of no folder", lambda: entries(api.list_repo_tree(MODEL, "nowhere"))),
    ("tree of a deep folder", lambda: entries(api.list_repo_tree(MODEL, "a/b"))),
    ("last commit of each", lambda: _last_commits()),
    ("paths-info of a file", lambda: entries(api.get_paths_info(MODEL, "config.json"))),
    ("paths-info of a folder", lambda: entries(api.get_paths_info(MODEL, ["onnx"]))),
    ("paths-info of all", lambda: entries(api.get_paths_info(MODEL, ["a/b", "vocab.txt", "no"]))),
    ("paths-info expanded", lambda: entries(api.get_paths_info(MODEL, ["onnx"], expand=True))),
    ("paths-info of an old name", lambda: entries(api.get_paths_info(OLD, ["config.json"]))),
    ("refs", lambda: [[r.name, r.target_commit] for r in api.list_repo_refs(MODEL).branches]),
    ("commits", lambda: [c.commit_id for c in api.list_repo_commits(MODEL)]),
    ("file_exists", lambda: api.file_exists(MODEL, "config.json")),
    ("file_exists, none", lambda: api.file_exists(MODEL, "none.json")),
    ("repo_exists", lambda: [api.repo_exists(MODEL), api.repo_exists("acme/none")]),
    ("revision_exists", lambda: [api.revision_exists(MODEL, r) for r in ("main", COMMIT, "v9")]),
    ("download", fetched),
    ("download of an LFS file", lambda: fetched(path="model.safetensors")),
    ("download in a folder", lambda: fetched(path="c.txt", subfolder="a/b")),
    ("download of a commit", lambda: fetched(revision=COMMIT)),
    ("download by an old name", lambda: fetched(OLD)),
    ("download of no file", lambda: fetched(path="none.json")),
    ("download of no revision", lambda: fetched(revision="v9")),
    ("download of no repository", lambda: fetched("acme/none")),
    ("download to a folder", lambda: fetched(local_dir=tempfile.mkdtemp())),
    ("download again", lambda: fetched(force_download=True)),
    ("download of a dataset's file", lambda: fetched(DATASET, PARQUET, repo_type="dataset")),
    ("metadata", lambda: metadata("config.json")),
    ("metadata of an LFS file", lambda: metadata("model.safetensors", COMMIT)),
    ("snapshot", snapshot),
    ("snapshot of some", lambda: snapshot(allow_patterns=["*.json"])),
    ("snapshot without some", lambda: snapshot(ignore_patterns=["*.safetensors", "onnx/*"])),
    ("snapshot from the cache", lambda: snapshot(local_files_only=True)),
    ("ls", lambda: names(files.ls(MODEL, detail=False))),
    ("ls of a folder", lambda: names(files.ls(f"{MODEL}/onnx", detail=False))),
    ("glob", lambda: names(files.glob(f"{MODEL}/**/*.json"))),
    ("glob of a commit", lambda: names(files.glob(f"{MODEL}@{COMMIT}/*.txt"))),
    ("find", lambda: names(files.find(MODEL))),
    ("info of a file", lambda: info("config.json")),
    ("info of a folder", lambda: info("onnx")),
    ("info of nothing", lambda: info("none")),
    ("exists", lambda: [files.exists(f"{MODEL}/{p}") for p in ("onnx", "config.json", "no")]),
    ("isdir", lambda: [files.isdir(f"{MODEL}/{p}") for p in ("onnx", "config.json")]),
    ("read", lambda: read("config.json")),
    ("read a part", lambda: read("model.safetensors", 1000, 70)),
    ("read the end", lambda: read("model.safetensors", 2000)),
    ("cat of a dataset's file", lambda: len(files.cat(f"datasets/{DATASET}/{PARQUET}"))),
    ("list_models", lambda: listed(author="acme")),
    ("list_models by words", lambda: listed(search="TINY")),
    ("list_models by nothing", lambda: listed(search="no such thing")),
    ("list_models with a limit", lambda: len(listed(limit=1))),
    ("list_datasets", lambda: sorted(d.id for d in api.list_datasets(author="acme"))),
    ("auth_check", lambda: api.auth_check(MODEL)),
    ("whoami", lambda: api.whoami(token="hf_none")),
    ("raw", lambda: raw("raw/main/config.json")),
    ("raw of an LFS file", lambda: raw("raw/main/model.safetensors")),
    ("a part", lambda: raw("resolve/main/config.json", Range="bytes=2-5")),
    ("a part of another file", lambda: _if_range('"another"')),
]


def _flags(found: Any) -> list[Any]:
    return [found.author, found.private, bool(found.gated), found.disabled]


def _last_commits() -> list[Any]:
    found = api.list_repo_tree(MODEL, recursive=True, expand=True)
    return sorted({item.last_commit["oid"] for item in found if hasattr(item, "size")})


def _if_range(etag: str) -> list[Any]:
    return raw("resolve/main/config.json", Range="bytes=2-5", **{"If-Range": etag})


def result(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:  # noqa: BLE001 - the class of an error is a result
        return f"raises {type(error).__name__}"


print(json.dumps({name: result(call) for name, call in CALLS}))
