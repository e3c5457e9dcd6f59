"""Finished bundles for tests, made from bytes by the modules that make real ones; without a Hub."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

from stage.bundle.bundle import TAG_MANIFEST, Bundle, finish_bundle, manifest_text, parse_manifest
from stage.files import Digest, hash_file, sha256_of_bytes
from stage.lock.model import Column, LockedAsset, LockedFile, LockedSplit, Lockfile, Source
from tests.stage.locks import COMMIT
from tests.support.staging import safetensors

BIG = "data/files/big/sparse.bin"
BIG_SIZE = 65 * 2**20  # takes long enough to be interrupted
REQUEST = b"format: 1\nname: made\nassets:\n  bert:\n    model: acme/bert\n"
FACTS = [("Bagging-Date", "2026-01-02"), ("Airlift-Host", "laptop")]


@cache
def contents() -> dict[str, bytes]:
    """Payload path -> bytes: some of equal size, one empty, one name in another script."""
    noise = random.Random(2)
    return {
        "data/models/bert/config.json": b'{"model_type": "bert"}\n',
        "data/models/bert/vocab.txt": b'{"equal in size": 000}\n',
        "data/models/bert/model.safetensors": safetensors(200_000),
        "data/models/bert/1_Pooling/config.json": b"{}",
        "data/datasets/lines/plain/train-00000-of-00002.parquet": noise.randbytes(5000),
        "data/datasets/lines/plain/train-00001-of-00002.parquet": noise.randbytes(5000),
        "data/files/notes/empty": b"",
        "data/files/notes/a b/größe  ü.txt": b"\n\n",
    }


def make_bundle(
    root: Path,
    *,
    facts: Iterable[tuple[str, str]] = FACTS,
    big: bool = True,
    files: Mapping[str, bytes] | None = None,
    name: str = "made",
) -> Bundle:
    """Writes a finished bundle.

    Args:
        big: adds a large file.
        files: payload path -> bytes of all other files (default: `contents`).
        name: of the bundle, in its lock.
    """
    root.mkdir()
    files = contents() if files is None else files
    for path, data in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data)
    if big:
        (root / BIG).parent.mkdir(parents=True)
        with open(root / BIG, "wb") as target:
            target.truncate(BIG_SIZE)
            target.seek(20 * 2**20)
            target.write(b"not only zeros")
    lock = replace(_lock(root, big, files), name=name)
    return finish_bundle(root, lock, REQUEST, facts)


def _lock(root: Path, big: bool, files: Iterable[str]) -> Lockfile:
    def entry(path: str, upstream: bool) -> LockedFile:
        digests = hash_file(root / path, git=True)
        evidence = Digest("git-sha1", digests.git_sha1 or "") if upstream else None
        name = path.rpartition("/")[2]
        return LockedFile(path, digests.size, digests.sha256, evidence, name)

    def below(folder: str, upstream: bool = True) -> tuple[LockedFile, ...]:
        return tuple(entry(path, upstream) for path in files if path.startswith(folder))

    hub = Source("hub", "acme/bert", "main", COMMIT)
    shards = below("data/datasets/lines/")
    split = LockedSplit(tuple(file.path for file in shards), 7, (Column("text", "string"),))
    every = [
        LockedAsset(
            "bert",
            "model",
            {"model": "acme/bert", "revision": "main"},
            hub,
            below("data/models/bert/"),
            licence="mit",
        ),
        LockedAsset(
            "lines",
            "dataset",
            {"dataset": "a/l", "revision": "main"},
            hub,
            shards,
            configs={"plain": {"train": split}},
        ),
        LockedAsset(
            "notes",
            "files",
            {"path": "n"},
            Source("path", "n"),
            below("data/files/notes/", upstream=False),
        ),
    ]
    assets = [asset for asset in every if asset.files]
    if big:
        assets.append(
            LockedAsset("big", "files", {"path": "b"}, Source("path", "b"), (entry(BIG, False),))
        )
    return Lockfile(
        "made", {asset.name: asset for asset in sorted(assets, key=lambda asset: asset.name)}
    )


def reseal(root: Path, *paths: str) -> None:
    """Makes the tag manifest agree with these files beside the payload, as they are now."""
    digests = parse_manifest((root / TAG_MANIFEST).read_bytes())
    digests |= {path: sha256_of_bytes((root / path).read_bytes()) for path in paths}
    (root / TAG_MANIFEST).write_bytes(manifest_text(digests))
