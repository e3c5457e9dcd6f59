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
        for piece in self._text():
            digest.update(piece)
        return digest.hexdigest()

    def with_asset(self, asset: LockedAsset) -> Lockfile:
        """The same lock with one asset replaced."""
        return replace(self, assets={**self.assets, asset.name: asset})

    def to_json(self) -> bytes:
        """The canonical text (UTF-8, keys sorted, newline at the end)."""
        return b"".join(self.pieces())

    def pieces(self) -> Iterator[bytes]:
        """The text in pieces. Who took all of them gets `id` without making it once more."""
        digest = sha256()
        for piece in self._text():
            digest.update(piece)
            yield piece
        vars(self)["id"] = digest.hexdigest()  # where `cached_property` looks

    def _text(self) -> Iterator[bytes]:
        """A few thousand tokens at a time: all of them take five times the memory of the text."""
        assets = {name: _asset_to_json(asset) for name, asset in self.assets.items()}
        document = {"format": FORMAT, "name": self.name, "assets": assets}
        encoder = json.JSONEncoder(
            indent=1, sort_keys=True, ensure_ascii=False, default=_file_to_json
        )
        tokens = encoder.iterencode(document)
        while piece := "".join(islice(tokens, 4096)):
            yield piece.encode()
        yield b"\n"


def _asset_to_json(asset: LockedAsset) -> dict[str, Any]:
    source = asset.source
    pins = ("requested_revision", "commit", "parquet_commit")
    optional = {
        "made_from": [
            _ingredient_to_json(i) for i in sorted(asset.made_from, key=_made_from_order)
        ],
        "made_with": dict(asset.made_with),
        "aliases": sorted(asset.aliases),
        "base": asdict(asset.base) if asset.base else None,
        "code": [
            {**asdict(code), "files": sorted(code.files)}
            for code in sorted(asset.code, key=attrgetter("repository"))
        ],
        "environment": asdict(asset.environment) if asset.environment else None,
    }
    document: dict[str, Any] = {
        "kind": asset.kind,
        "request": dict(asset.request),
        "source": {
            "type": source.type,
            LOCATION_KEYS[source.type]: source.location,
            **{key: value for key in pins if (value := getattr(source, key)) is not None},
        },
        "licence": asset.licence,
        "files": sorted(asset.files, key=_PATH),  # each becomes a row when it is written
        "left_out": [asdict(left) for left in sorted(asset.left_out, key=_PATH)],
        **{key: value for key, value in optional.items() if value},
    }
    if asset.kind == "dataset":
        document["configs"] = {
            config: {name: _split_to_json(split) for name, split in splits.items()}
            for config, splits in asset.configs.items()
        }
    return document


def _file_to_json(file: LockedFile) -> dict[str, Any]:
    document = {"path": file.path, **_origin_to_json(file)}
    if file.made_by is not None:
        document["made_by"] = file.made_by
    return document


def _ingredient_to_json(ingredient: Ingredient) -> dict[str, Any]:
    part = asdict(ingredient.part) if ingredient.part else {}
    known = {key: value for key, value in part.items() if value is not None}
    return {**_origin_to_json(ingredient), **known}


def _origin_to_json(file: LockedFile | Ingredient) -> dict[str, Any]:
    document: dict[str, Any] = {"origin": file.origin, "size": file.size, "sha256": file.sha256}
    if file.upstream is not None:
        document["upstream"] = {file.upstream.algorithm: file.upstream.value}
    return document


def _made_from_order(ingredient: Ingredient) -> tuple[str, str]:
    return ingredient.origin, ingredient.part.split if ingredient.part else ""


def _split_to_json(split: LockedSplit) -> dict[str, Any]:
    document = {**asdict(split), "shards": list(split.shards)}
    if split.declared_rows is None:
        del document["declared_rows"]
    return document
