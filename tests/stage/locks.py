"""Locks for tests: one of every kind of asset by hand, and any lock at all by hypothesis."""

from __future__ import annotations

import json
import unicodedata
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from stage.digest import Digest
from stage.lockfile import (
    FOLDERS,
    Column,
    LeftOut,
    LockedAsset,
    LockedEnvironment,
    LockedFile,
    LockedSplit,
    Lockfile,
    PackageEntry,
    Source,
)
from stage.names import collisions, problem_with_asset_name, problem_with_path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def locked_file(path: str, size: int = 10, evidence: str = "lfs-sha256") -> LockedFile:
    """A complete file entry whose digests are made of its name."""
    digest = path.encode().hex().ljust(64, "0")[-64:]
    upstream = Digest(evidence, digest[: 40 if evidence == "git-sha1" else 64])
    return LockedFile(path, size, digest, upstream, path.rpartition("/")[2])


def every_kind() -> Lockfile:
    """A complete lock with a model, a tokenizer, a dataset of two configs, and local files."""
    folder = "data/datasets/lines"
    shards = (f"{folder}/plain/train-00000-of-00002.parquet", f"{folder}/plain/train-00001-of-00002.parquet")
    other = f"{folder}/other/test-00000-of-00001.parquet"
    schema = (Column("text", "string"), Column("spalte ü", "list<element: int64>"))
    model = LockedAsset(
        name="bert",
        kind="model",
        request={"model": "acme/bert", "revision": "main", "exclude": ["*.h5"]},
        source=Source("hub", "acme/bert-large", "main", COMMIT),
        files=(
            locked_file("data/models/bert/config.json", 7, "git-sha1"),
            locked_file("data/models/bert/model.safetensors", 10**12),
        ),
        left_out=(LeftOut("tf_model.h5", 5, "excluded by the manifest"), LeftOut("bad\nname", 0, "a pickle")),
        aliases=("acme/bert",),
        licence="apache-2.0",
    )
    tokenizer = LockedAsset(
        name="tok",
        kind="tokenizer",
        request={"tokenizer": "acme/tok", "revision": COMMIT},
        source=Source("hub", "acme/tok", COMMIT, COMMIT),
        files=(locked_file("data/models/tok/tokenizer.json"),),
    )
    dataset = LockedAsset(
        name="lines",
        kind="dataset",
        request={"dataset": "acme/lines", "revision": "v1", "config": "plain", "splits": ["train"]},
        source=Source("hub", "acme/lines", "v1", COMMIT, COMMIT[::-1]),
        files=tuple(locked_file(path) for path in (*shards, other)),
        configs={
            "plain": {"train": LockedSplit(shards, 7, schema, declared_rows=7)},
            "other": {"test": LockedSplit((other,), 0, ())},
        },
    )
    files = LockedAsset(
        name="notes",
        kind="files",
        request={"path": "./notes"},
        source=Source("path", "./notes"),
        files=(LockedFile("data/files/notes/a b/ü.txt", 0, "e" * 64, None, "a b/ü.txt"),),
    )
    return Lockfile("every-kind", {asset.name: asset for asset in (model, tokenizer, dataset, files)})


def document(lock: Lockfile | None = None) -> dict[str, Any]:
    """A lock's JSON as plain data, to be edited."""
    parsed: dict[str, Any] = json.loads((lock or every_kind()).to_json())
    return parsed


def canonical(lock: Lockfile) -> Lockfile:
    """The same lock with everything that has no order in the order its text has."""
    return Lockfile(
        lock.name,
        {
            name: replace(
                lock.assets[name],
                files=tuple(sorted(lock.assets[name].files, key=lambda f: f.path)),
                left_out=tuple(sorted(lock.assets[name].left_out, key=lambda o: o.path)),
                aliases=tuple(sorted(lock.assets[name].aliases)),
            )
            for name in sorted(lock.assets)
        },
    )


hexes = {n: st.text("0123456789abcdef", min_size=n, max_size=n) for n in (40, 64)}
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=10)
asset_names = st.text("abc._-XYZ09é", min_size=1, max_size=6).filter(
    lambda name: problem_with_asset_name(name) is None and unicodedata.normalize("NFC", name) == name
)
sizes = st.integers(0, 2**50)
digests = st.one_of(
    st.builds(Digest, st.just("lfs-sha256"), hexes[64]), st.builds(Digest, st.just("git-sha1"), hexes[40])
)


@st.composite
def _assets(draw: st.DrawFn, name: str) -> LockedAsset:
    kind = draw(st.sampled_from(sorted(FOLDERS)))
    folder = f"data/{FOLDERS[kind]}/{name}/"
    leaves = st.lists(st.text("abé ./%", min_size=1, max_size=8).map(lambda p: folder + p), max_size=4, unique=True)
    paths = draw(leaves.map(lambda many: [p for p in many if problem_with_path(p) is None]))
    files = [
        LockedFile(path, draw(sizes), draw(st.none() | hexes[64]), draw(st.none() | digests), draw(texts))
        for path in paths
    ]
    hub = st.builds(Source, st.just("hub"), texts, st.none() | texts, hexes[40], st.none() | hexes[40])
    source = draw(hub | st.builds(Source, st.just("path"), texts))
    columns = st.none() | st.lists(st.builds(Column, texts, texts), max_size=2).map(tuple)
    shards = st.lists(st.sampled_from(paths), max_size=3).map(tuple) if paths else st.just(())
    splits = st.builds(LockedSplit, shards, st.none() | sizes, columns, st.none() | sizes)
    environments = st.builds(
        LockedEnvironment,
        texts,
        st.dictionaries(texts, texts, max_size=2),
        st.lists(st.builds(PackageEntry, texts, texts, texts, _inside(paths, folder)), max_size=2).map(tuple)
        if paths
        else st.just(()),
        st.none() | hexes[64],
    )
    return LockedAsset(
        name=name,
        kind=kind,
        environment=draw(environments) if kind == "environment" else None,
        request=draw(st.dictionaries(texts, texts | st.booleans() | st.lists(texts, max_size=2), max_size=3)),
        source=source,
        files=tuple(files),
        left_out=tuple(
            draw(st.lists(st.builds(LeftOut, texts, sizes, texts), max_size=2, unique_by=lambda left: left.path))
        ),
        aliases=tuple(draw(st.lists(texts, max_size=2))),
        licence=draw(st.none() | texts),
        configs=draw(st.dictionaries(texts, st.dictionaries(texts, splits, max_size=2), max_size=2))
        if kind == "dataset"
        else {},
    )


def _inside(paths: list[str], folder: str) -> st.SearchStrategy[str]:
    return st.sampled_from([path.removeprefix(folder) for path in paths])


@st.composite
def locks(draw: st.DrawFn) -> Lockfile:
    """Any lock that may be written: complete or not."""
    names = draw(st.lists(asset_names, max_size=3, unique=True))
    lock = Lockfile(draw(texts), {name: draw(_assets(name)) for name in names})
    paths = [file.path for file in lock.files]
    return lock if not collisions(paths) else Lockfile(lock.name, {})
