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
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from itertools import islice
from operator import attrgetter
from typing import Any

from stage.digests import Digest
from stage.lock.model import LOCATION_KEYS, Ingredient, LockedAsset, LockedFile, Source
from stage.lock.reader import row

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
        for piece in self.pieces():
            digest.update(piece)
        return digest.hexdigest()

    def with_asset(self, asset: LockedAsset) -> Lockfile:
        """The same lock with one asset replaced."""
        return replace(self, assets={**self.assets, asset.name: asset})

    def to_json(self) -> bytes:
        """The canonical text (UTF-8, keys sorted, newline at the end)."""
        return b"".join(self.pieces())

    def pieces(self) -> Iterator[bytes]:
        """The text, a few thousand tokens at a time: all of them take five times its memory."""
        document = {"format": FORMAT, "name": self.name, "assets": dict(self.assets)}
        encoder = json.JSONEncoder(indent=1, sort_keys=True, ensure_ascii=False, default=_row)
        tokens = encoder.iterencode(document)
        while piece := "".join(islice(tokens, 4096)):
            yield piece.encode()
        yield b"\n"


def _row(value: Any) -> dict[str, Any]:
    """The first level of a part of a lock; the encoder comes back for what is in it."""
    if isinstance(value, Digest):
        return {value.algorithm: value.value}
    document = row(value)
    if isinstance(value, Source):
        document[LOCATION_KEYS[value.type]] = document.pop("location")
    elif isinstance(value, Ingredient) and value.part is not None:
        document |= row(document.pop("part"))
    elif isinstance(value, LockedAsset):
        del document["name"]  # its key in the mapping of all assets
        if value.kind != "dataset":
            del document["configs"]
    return document
