"""The lock of a bundle as JSON. `stage.lock.read` reads it back.

A lock pins each byte of a bundle: for each asset its source at a commit, each file with size,
sha256 and the digest that its source published, each dataset split with rows, schema and shards.
The text is deterministic (sorted; no date, host, endpoint or tool version), so its sha256 is the
bundle id.

The lock that `resolve` makes may lack the sha256 of small files and the rows of a dataset, because
the Hub does not publish them. `fetch` adds them. `is_complete` distinguishes the two.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from hashlib import sha256
from itertools import islice
from operator import attrgetter
from typing import Any

from stage.lock.model import LOCATION_KEYS, Ingredient, LockedAsset, LockedFile, LockedSplit

FORMAT = 1

_PATH = attrgetter("path")


@dataclass(frozen=True)
class Lockfile:
    """All assets of a bundle, by name."""

    name: str
    assets: Mapping[str, LockedAsset]

    @cached_property
    def files(self) -> tuple[LockedFile, ...]:
        """Every payload file, sorted by path."""
        return tuple(sorted((f for asset in self.assets.values() for f in asset.files), key=_PATH))

    @property
    def size(self) -> int:
        """Payload bytes."""
        return sum(asset.size for asset in self.assets.values())

    @property
    def is_complete(self) -> bool:
        """Whether every digest, row count and schema is known."""
        return all(asset.is_complete for asset in self.assets.values())

    @cached_property
    def id(self) -> str:
        """sha256 of the JSON text: the bundle id, once complete."""
        digest = sha256()
        for piece in self._pieces():
            digest.update(piece)
        return digest.hexdigest()

    def with_asset(self, asset: LockedAsset) -> Lockfile:
        """The same lock with one asset replaced."""
        return replace(self, assets={**self.assets, asset.name: asset})

    def to_json(self) -> bytes:
        """The canonical text (UTF-8, keys sorted, newline at the end)."""
        return self._text

    @cached_property
    def _text(self) -> bytes:
        return b"".join(self._pieces())

    def _pieces(self) -> Iterator[bytes]:
        """The text, a few thousand tokens at a time: all of them take five times its memory."""
        assets = {name: _asset_to_json(asset) for name, asset in self.assets.items()}
        document = {"format": FORMAT, "name": self.name, "assets": assets}
        encoder = json.JSONEncoder(indent=1, sort_keys=True, ensure_ascii=False)
        tokens = encoder.iterencode(document)
        while piece := "".join(islice(tokens, 4096)):
            yield piece.encode()
        yield b"\n"


def _file_to_json(file: LockedFile) -> dict[str, Any]:
    document: dict[str, Any] = {
        "path": file.path,
        "size": file.size,
        "sha256": file.sha256,
        "origin": file.origin,
    }
    if file.made_by is not None:
        document["made_by"] = file.made_by
    if file.upstream is not None:
        document["upstream"] = {file.upstream.algorithm: file.upstream.value}
    return document


def _asset_to_json(asset: LockedAsset) -> dict[str, Any]:
    source = {"type": asset.source.type, LOCATION_KEYS[asset.source.type]: asset.source.location}
    for key in ("requested_revision", "commit", "parquet_commit"):
        if (value := getattr(asset.source, key)) is not None:
            source[key] = value
    document: dict[str, Any] = {
        "kind": asset.kind,
        "request": dict(asset.request),
        "source": source,
        "licence": asset.licence,
        "files": [_file_to_json(file) for file in sorted(asset.files, key=_PATH)],
        "left_out": [
            {"path": o.path, "size": o.size, "reason": o.reason}
            for o in sorted(asset.left_out, key=lambda o: o.path)
        ],
    }
    if asset.made_from:
        document["made_from"] = [
            _ingredient_to_json(i) for i in sorted(asset.made_from, key=_made_from_order)
        ]
    if asset.aliases:
        document["aliases"] = sorted(asset.aliases)
    if asset.base:
        document["base"] = {"repository": asset.base.repository, "revision": asset.base.revision}
    if asset.code:
        document["code"] = [
            {
                "repository": c.repository,
                "commit": c.commit,
                "licence": c.licence,
                "files": sorted(c.files),
            }
            for c in sorted(asset.code, key=lambda c: c.repository)
        ]
    if asset.kind == "dataset":
        document["configs"] = {
            config: {name: _split_to_json(split) for name, split in splits.items()}
            for config, splits in asset.configs.items()
        }
    if asset.environment is not None:
        document["environment"] = asdict(asset.environment)
    return document


def _ingredient_to_json(ingredient: Ingredient) -> dict[str, Any]:
    document: dict[str, Any] = {
        "origin": ingredient.origin,
        "size": ingredient.size,
        "sha256": ingredient.sha256,
    }
    if ingredient.upstream is not None:
        document["upstream"] = {ingredient.upstream.algorithm: ingredient.upstream.value}
    if (part := ingredient.part) is not None:
        document |= {"split": part.split, "convert": part.convert}
        if part.separator is not None:
            document["separator"] = part.separator
    return document


def _made_from_order(ingredient: Ingredient) -> tuple[str, str]:
    return ingredient.origin, ingredient.part.split if ingredient.part else ""


def _split_to_json(split: LockedSplit) -> dict[str, Any]:
    schema = (
        None if split.schema is None else [{"name": c.name, "type": c.type} for c in split.schema]
    )
    document = {"rows": split.rows, "schema": schema, "shards": list(split.shards)}
    return (
        document
        if split.declared_rows is None
        else {**document, "declared_rows": split.declared_rows}
    )
