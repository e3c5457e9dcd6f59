"""Locks for tests: together they have each kind of asset."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from stage.files import Digest
from stage.lock.model import (
    Base,
    Code,
    Column,
    Ingredient,
    LeftOut,
    LockedAsset,
    LockedFile,
    LockedSplit,
    Lockfile,
    Part,
    Source,
)

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def locked_file(path: str, size: int = 10, evidence: str = "lfs-sha256") -> LockedFile:
    """A complete file entry whose digests are made of its name."""
    digest = path.encode().hex().ljust(64, "0")[-64:]
    upstream = Digest(evidence, digest[: 40 if evidence == "git-sha1" else 64])
    return LockedFile(path, size, digest, upstream, path.rpartition("/")[2])


def every_kind() -> Lockfile:
    """A complete lock with a model, a tokenizer, a dataset of two configs, and local files."""
    folder = "data/datasets/lines"
    shards = (
        f"{folder}/plain/train-00000-of-00002.parquet",
        f"{folder}/plain/train-00001-of-00002.parquet",
    )
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
        left_out=(
            LeftOut("tf_model.h5", 5, "excluded by the manifest"),
            LeftOut("bad\nname", 0, "a pickle"),
        ),
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
    return Lockfile(
        "every-kind", {asset.name: asset for asset in (model, tokenizer, dataset, files)}
    )


def fetched_and_made() -> Lockfile:
    """A complete lock: an adapter, its base, code of another repository, a converted dataset."""
    config, made = (
        "data/models/lora/config.json",
        "data/datasets/raw/default/train-00000-of-00001.parquet",
    )
    lora = LockedAsset(
        name="lora",
        kind="model",
        request={"model": "acme/lora", "revision": "main", "allow_code": True},
        source=Source("hub", "acme/lora", "main", COMMIT),
        files=(
            LockedFile(config, 5, "d" * 64, None, "config.json", "auto_map"),
            locked_file("data/models/lora/m.py"),
        ),
        made_from=(Ingredient("config.json", 9, "c" * 64, Digest("git-sha1", COMMIT)),),
        base=Base("acme/base", "v1"),
        code=(Code("acme/code", COMMIT, "mit", ("data/models/lora/m.py",)),),
    )
    base = LockedAsset(
        name="base",
        kind="model",
        request={"model": "acme/base", "revision": "v1"},
        source=Source("hub", "acme/base", "v1", COMMIT),
        files=(
            locked_file("data/models/base/README.md"),
            locked_file("data/models/base/config.json"),
        ),
    )
    raw = LockedAsset(
        name="raw",
        kind="dataset",
        request={"dataset": "acme/raw", "revision": "main"},
        source=Source("hub", "acme/raw", "main", COMMIT),
        files=(LockedFile(made, 5, "d" * 64, None, "csv: a.csv", "csv"),),
        configs={"default": {"train": LockedSplit((made,), 1, (Column("x", "int64"),))}},
        made_from=(
            Ingredient(
                "https://example.org/a.csv",
                5,
                "c" * 64,
                Digest("git-sha1", COMMIT),
                Part("train", "csv", ";"),
            ),
        ),
    )
    return Lockfile("brought", {asset.name: asset for asset in (lora, base, raw)})


def document(lock: Lockfile | None = None) -> dict[str, Any]:
    """A lock's JSON as plain data, for edits."""
    parsed: dict[str, Any] = json.loads((lock or every_kind()).to_json())
    return parsed


def canonical(lock: Lockfile) -> Lockfile:
    """The same lock with each unordered list in the order of the text."""
    return Lockfile(
        lock.name,
        {
            name: replace(
                lock.assets[name],
                files=tuple(sorted(lock.assets[name].files, key=lambda f: f.path)),
                left_out=tuple(sorted(lock.assets[name].left_out, key=lambda o: o.path)),
                aliases=tuple(sorted(lock.assets[name].aliases)),
                made_from=tuple(sorted(lock.assets[name].made_from, key=_made_from_order)),
                code=tuple(
                    replace(code, files=tuple(sorted(code.files)))
                    for code in sorted(lock.assets[name].code, key=lambda code: code.repository)
                ),
            )
            for name in sorted(lock.assets)
        },
    )


def _made_from_order(ingredient: Ingredient) -> tuple[str, str]:
    return ingredient.origin, ingredient.part.split if ingredient.part else ""
