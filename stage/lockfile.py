"""The resolved description of a bundle, to and from JSON.

What a manifest asked for becomes, here, exactly which bytes: for each asset its source pinned to a commit, each
file with size, sha256 and the upstream's own evidence, each dataset split with rows, schema and shards. The text
is deterministic (sorted, no date, host, endpoint or tool version), so its sha256 is the bundle id. `lockreader` reads
it back.

A lock fresh from `resolve` may not know the sha256 of small files nor the rows of a dataset (the Hub does not
publish them); `fetch` fills them in. `is_complete` tells the two apart.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from json.encoder import encode_basestring as _quoted  # as with `ensure_ascii=False`
from operator import attrgetter
from typing import Any

from stage.asset import Ingredient, LockedAsset, LockedFile, LockedSplit
from stage.digest import sha256_of_bytes
from stage.errors import UsageError

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
        return sha256_of_bytes(self.to_json())

    def with_asset(self, asset: LockedAsset) -> Lockfile:
        """The same lock with one asset replaced."""
        return replace(self, assets={**self.assets, asset.name: asset})

    def to_json(self) -> bytes:
        """The lock's one true text (UTF-8, keys sorted, newline at the end).

        It is what `json.dumps(..., indent=1)` makes of the whole, four times as fast: that goes value by value.
        """
        return self._text

    @cached_property
    def _text(self) -> bytes:
        # Three spaces and a quote at the start of a line: an asset's own key, since text has no raw newline in JSON.
        parts = self.without_files().split('\n   "files": null')
        lists = [_files_text(self.assets[name].files) for name in sorted(self.assets)]
        return "".join(part + text for part, text in zip(parts, [*lists, ""], strict=True)).encode()

    def without_files(self) -> str:
        """The one true text with `null` in place of every list of files."""
        assets = {name: _asset_to_json(asset) for name, asset in self.assets.items()}
        return _dumps({"format": FORMAT, "name": self.name, "assets": assets}) + "\n"

    def written_as(self, text: bytes) -> Lockfile:
        """This lock, for who knows already that `text` is its one true text: it takes long to write."""
        vars(self)["_text"] = text
        return self


def _dumps(value: Any) -> str:
    return json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False)


def _files_text(files: Iterable[LockedFile]) -> str:
    entries = [_file_text(file) for file in sorted(files, key=_PATH)]
    return '\n   "files": [' + ",".join(entries) + ("\n   ]" if entries else "]")


def _file_text(file: LockedFile) -> str:
    made_by = f'\n     "made_by": {_quoted(file.made_by)},' if file.made_by is not None else ""
    sha256 = _quoted(file.sha256) if file.sha256 is not None else "null"
    upstream = ""
    if (evidence := file.upstream) is not None:
        upstream = f',\n     "upstream": {{\n      "{evidence.algorithm}": "{evidence.value}"\n     }}'
    return (
        f'\n    {{{made_by}\n     "origin": {_quoted(file.origin)},\n     "path": {_quoted(file.path)},'
        f'\n     "sha256": {sha256},\n     "size": {file.size}{upstream}\n    }}'
    )


def _asset_to_json(asset: LockedAsset) -> dict[str, Any]:
    source = {"type": asset.source.type}
    if asset.source.type == "hub":
        source |= {"repository": asset.source.location}
    else:
        source |= {asset.source.type: asset.source.location}
    for key in ("requested_revision", "commit", "parquet_commit"):
        if (value := getattr(asset.source, key)) is not None:
            source[key] = value
    document: dict[str, Any] = {
        "kind": asset.kind,
        "request": dict(asset.request),
        "source": source,
        "licence": asset.licence,
        "files": None,  # written by `_files_text`
        "left_out": [
            {"path": o.path, "size": o.size, "reason": o.reason} for o in sorted(asset.left_out, key=lambda o: o.path)
        ],
    }
    if asset.made_from:
        document["made_from"] = [_ingredient_to_json(i) for i in sorted(asset.made_from, key=_made_from_order)]
    if asset.aliases:
        document["aliases"] = sorted(asset.aliases)
    if asset.base:
        document["base"] = {"repository": asset.base.repository, "revision": asset.base.revision}
    if asset.base_of:
        document["base_of"] = sorted(asset.base_of)
    if asset.code:
        document["code"] = [
            {"repository": c.repository, "commit": c.commit, "licence": c.licence, "files": sorted(c.files)}
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
    schema = None if split.schema is None else [{"name": c.name, "type": c.type} for c in split.schema]
    document = {"rows": split.rows, "schema": schema, "shards": list(split.shards)}
    return document if split.declared_rows is None else {**document, "declared_rows": split.declared_rows}


def newer_format(where: str, found: object) -> UsageError:
    """What to say of a lock this version is too old to read."""
    return UsageError(
        f"{where}: format {found!r}; this version of airlift reads format {FORMAT}.",
        "Use a newer airlift: pip install --upgrade airlift",
    )
