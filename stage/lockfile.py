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
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from json.encoder import encode_basestring as _quoted  # as with `ensure_ascii=False`
from operator import attrgetter
from typing import Any

from stage.digest import Digest, sha256_of_bytes
from stage.errors import UsageError

FORMAT = 1

_PATH = attrgetter("path")
FOLDERS = {"model": "models", "tokenizer": "models", "dataset": "datasets", "files": "files", "environment": "envs"}
CARD = "CARD.md"  # a dataset's README.md: under its own name, `load_dataset(folder)` would read the repository's paths


@dataclass(frozen=True)
class Source:
    """Where an asset comes from: a Hub repository at a commit, a local path, a web address, an environment's lock.

    Attributes:
        type: `hub`, `path`, `url` or `environment`.
        location: repository id (`org/name`), or the path or address as written in the manifest.
        requested_revision: what the manifest said (`main`, a tag, a commit); None but for the Hub.
        commit: the 40-hex commit it meant; None but for the Hub.
        parquet_commit: for a dataset taken from the Hub's own conversion, the commit of `refs/convert/parquet`.
    """

    type: str
    location: str
    requested_revision: str | None = None
    commit: str | None = None
    parquet_commit: str | None = None

    @property
    def repository(self) -> str:
        """The Hub repository id."""
        return self.location


@dataclass(frozen=True, init=False)
class LockedFile:
    """One payload file.

    Attributes:
        path: where it lies in the bundle, `data/...`.
        size: bytes.
        sha256: hex, or None until fetched.
        upstream: the evidence published before the download; None for local files.
        origin: the file's path at its source; of a converted file: what it was made of, in words.
        made_by: None for a file that travels as it was published. Else what `fetch` made it by, out of the asset's
            `made_from`: `download`, `unpack`, `safetensors`, `wheel`, `environment`, or a conversion (`csv`, ...).
    """

    path: str
    size: int
    sha256: str | None
    upstream: Digest | None
    origin: str
    made_by: str | None = None

    def __init__(
        self, path: str, size: int, sha256: str | None, upstream: Digest | None, origin: str, made_by: str | None = None
    ) -> None:
        # What `dataclass` makes for a frozen class takes four times as long, and a lock can have 100,000 files.
        vars(self).update(path=path, size=size, sha256=sha256, upstream=upstream, origin=origin, made_by=made_by)


@dataclass(frozen=True)
class Part:
    """What a file of a Hub dataset becomes: rows of one split.

    Attributes:
        convert: how it is read, one of `manifest.CONVERSIONS`.
        separator: between the cells of a CSV, where the dataset's card names one.
    """

    split: str
    convert: str
    separator: str | None = None


@dataclass(frozen=True)
class Ingredient:
    """A file that does not travel itself, and that files of the bundle were made of: an archive, a CSV, a pickle.

    Attributes:
        origin: its path at the source, or its address.
        size, sha256: None while unknown (an address without a digest, before the first fetch).
        upstream: the evidence published before the download, if any.
        part: of a file of a Hub dataset, what it becomes.
    """

    origin: str
    size: int | None
    sha256: str | None
    upstream: Digest | None = None
    part: Part | None = None


@dataclass(frozen=True)
class Base:
    """The model an adapter was trained on, as its adapter_config.json names it."""

    repository: str
    revision: str


@dataclass(frozen=True)
class Code:
    """Python code of a repository that loading the asset runs, by leave of the manifest (`allow_code`).

    Attributes:
        repository: the asset's own, or another that its config refers to.
        files: payload paths.
    """

    repository: str
    commit: str
    licence: str | None
    files: tuple[str, ...]


@dataclass(frozen=True)
class LeftOut:
    """A file of the source that does not travel, and why."""

    path: str
    size: int
    reason: str


@dataclass(frozen=True)
class Column:
    """A column of a dataset: its name and Arrow type, as pyarrow prints it."""

    name: str
    type: str


@dataclass(frozen=True)
class LockedSplit:
    """One split of a dataset: payload paths of its shards in order.

    Attributes:
        rows, schema: None until fetched.
        declared_rows: what the dataset's card says; None where it says nothing.
    """

    shards: tuple[str, ...]
    rows: int | None = None
    schema: tuple[Column, ...] | None = None
    declared_rows: int | None = None


@dataclass(frozen=True)
class PackageEntry:
    """One package of an environment; its address and sha256 are those of the file at `path` in the asset's folder."""

    name: str
    version: str
    manager: str
    path: str


@dataclass(frozen=True)
class LockedEnvironment:
    """What an environment holds.

    Attributes:
        platform: conda's name of it, `linux-64`.
        virtual_packages: what it was solved for: `__glibc` -> `2.28`.
        tree: digest of all its files, the same in every prefix; None until made.
    """

    platform: str
    virtual_packages: Mapping[str, str]
    packages: tuple[PackageEntry, ...]
    tree: str | None = None


@dataclass(frozen=True)
class LockedAsset:
    """One named thing in a bundle.

    Attributes:
        kind: `model`, `tokenizer`, `dataset`, `files` or `environment`.
        request: the manifest's entry, normalised: what `fetch` compares to see whether the lock still answers it.
        aliases: names under which people know the repository besides `source.location`.
        licence: as the repository states it (SPDX where the Hub uses it), or None.
        configs: for a dataset, config -> split -> `LockedSplit`.
        made_from: what files with a `made_by` were made of.
        environment: None but for an environment.
        base: of an adapter, the model it needs; None also where that is no Hub repository.
        base_of: the adapters it was brought for; empty if the manifest asks for it.
        code: Python code among its files, by repository.
    """

    name: str
    kind: str
    request: Mapping[str, Any]
    source: Source
    files: tuple[LockedFile, ...]
    left_out: tuple[LeftOut, ...] = ()
    aliases: tuple[str, ...] = ()
    licence: str | None = None
    configs: Mapping[str, Mapping[str, LockedSplit]] = field(default_factory=dict)
    made_from: tuple[Ingredient, ...] = ()
    environment: LockedEnvironment | None = None
    base: Base | None = None
    base_of: tuple[str, ...] = ()
    code: tuple[Code, ...] = ()

    @property
    def names(self) -> frozenset[str]:
        """Every name of the repository: what a script may call it."""
        return frozenset((self.source.location, *self.aliases))

    @property
    def folder(self) -> str:
        """The asset's folder in the bundle: `data/models/<name>`."""
        return f"data/{FOLDERS[self.kind]}/{self.name}"

    @property
    def size(self) -> int:
        """Bytes of all its files."""
        return sum(file.size for file in self.files)

    @property
    def is_complete(self) -> bool:
        """Whether every digest, row count and schema is known, and what is to be made was made once."""
        splits = [split for config in self.configs.values() for split in config.values()]
        return (
            all(f.sha256 for f in self.files)
            and all(s.rows is not None and s.schema is not None for s in splits)
            and all(i.sha256 and i.size is not None for i in self.made_from)
            and (not self.made_from or any(f.made_by for f in self.files))
            and (self.environment is None or self.environment.tree is not None)
        )


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
