"""The lock: each asset with its source, its files, and what they were made from. JSON on disk.

A field is a key there. The text depends only on what was fetched: keys and lists are sorted; it has
no date, host or endpoint, and no version of a tool but of those that made files. So its sha256 is
the bundle id (docs/adr/0002). The lock that `resolve` makes may lack the sha256 of small files and
the rows of a dataset, because the Hub does not publish them. `fetch` adds them. `is_complete`
distinguishes the two.

Reading (`read_lock`) believes nothing: a lock can come from anywhere (a mail, a mirror, a damaged
disk), and its paths decide which files are written and read. So the type of each field is checked.
Each path must be one that `stage.paths` allows, must be in its asset's folder, and must not collide
with another.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from itertools import islice
from operator import attrgetter
from typing import Any, Literal

from stage.bundle.verifier import LOCK_FORMAT
from stage.errors import PolicyError, about
from stage.files import Digest, Expected
from stage.lock.document import DocumentReader, commit_digits, read_document, sha256_digits
from stage.lock.reader import WrongValueError, described, keys_of, row, setting
from stage.lock.requests import LOCATION_KEYS
from stage.paths import (
    check_collisions,
    check_paths,
    is_split_name,
    printable,
    problem_with_asset_name,
)

FOLDERS = {
    "model": "models",
    "tokenizer": "models",
    "dataset": "datasets",
    "metric": "metrics",
    "files": "files",
    "environment": "envs",
}

_BY_PATH = attrgetter("path")


def _digest(found: Any) -> Digest:
    """The value of `upstream`: one digest, by its algorithm."""
    items = list(found.items()) if isinstance(found, dict) else []
    if len(items) != 1 or not isinstance(items[0][1], str):
        raise WrongValueError("must be one digest")
    try:
        return Digest(*items[0])
    except ValueError as error:
        raise WrongValueError(f"is no digest: {error}") from None


_SHA256 = described(convert=sha256_digits)
_UPSTREAM = described(takes=Any | None, convert=_digest, is_optional=True)

# A dataset's README.md. Under its own name, `load_dataset(folder)` would read the paths in it.
CARD = "CARD.md"


@dataclass(frozen=True)
class Source:
    """Where an asset comes from.

    Attributes:
        type: `hub`, `path`, `url` or `environment`.
        location: repository id (`org/name`), or the path or address as written in the manifest.
        requested_revision: the manifest's `main`, tag or commit; None if not from the Hub.
        commit: the 40-hex commit of that revision; None if not from the Hub.
        parquet_commit: of `refs/convert/parquet`, for a dataset that the Hub converted.
    """

    type: str = field(metadata=described(takes=Literal[tuple(LOCATION_KEYS)]))
    location: str
    requested_revision: str | None = setting(None, is_optional=True)
    commit: str | None = setting(None, convert=commit_digits, is_optional=True)
    parquet_commit: str | None = setting(None, convert=commit_digits, is_optional=True)

    @staticmethod
    def prepared(data: dict[str, Any]) -> dict[str, Any]:
        """The mapping in a lock, where the type decides the name of `location`."""
        return {**data, "location": data.get(LOCATION_KEYS.get(str(data.get("type")), ""))}

    @property
    def repository(self) -> str:
        """The Hub repository id."""
        return self.location

    @property
    def is_repository(self) -> bool:
        """Whether it has commits: one pins all of its files."""
        return self.type == "hub"

    @property
    def is_local(self) -> bool:
        """Whether its files are on this machine, and are read in place."""
        return self.type == "path"


@dataclass(frozen=True, slots=True)  # a lock can have 100,000 files: a third of the memory
class LockedFile:
    """One payload file.

    Attributes:
        path: in the bundle, `data/...`.
        size: bytes.
        sha256: hex, or None until fetched.
        upstream: the digest that the source published before the download; None for local files.
        origin: the file's path at its source; for a converted file, a description of its source.
        made_by: None for a file that is as published. Else how `fetch` made it from the asset's
            `made_from`: `download`, `unpack`, `safetensors`, `environment`, or a conversion
            (`csv`, ...).
    """

    path: str
    size: int
    sha256: str | None = field(metadata=_SHA256)
    upstream: Digest | None = field(metadata=_UPSTREAM)
    origin: str
    made_by: str | None = setting(None, is_optional=True)

    @property
    def expected(self) -> Expected:
        """What its bytes must be."""
        return Expected(self.origin, self.size, self.sha256, self.upstream)


def _split_name(text: str) -> str:
    if not is_split_name(text):
        raise WrongValueError("cannot name a split")
    return text


@dataclass(frozen=True)
class Part:
    """How a file of a Hub dataset becomes rows of one split.

    Attributes:
        convert: one of `stage.lock.requests.CONVERSIONS`.
        separator: between the cells of a CSV, if the dataset's card names one.
    """

    split: str = field(metadata=described(convert=_split_name))
    convert: str
    separator: str | None = setting(None, is_optional=True)


@dataclass(frozen=True)
class Ingredient:
    """A file from which files of the bundle were made (archive, CSV, wheel). It does not travel.

    Attributes:
        origin: its path at the source, or its address.
        size, sha256: None while unknown (an address without a digest, before the first fetch).
        upstream: the digest published before the download, if any.
        part: what a file of a Hub dataset becomes.
    """

    origin: str
    size: int | None
    sha256: str | None = field(metadata=_SHA256)
    upstream: Digest | None = field(default=None, metadata=_UPSTREAM)
    part: Part | None = setting(None, is_optional=True)

    @staticmethod
    def prepared(data: dict[str, Any]) -> dict[str, Any]:
        """The mapping in a lock, which has the keys of a part beside the others."""
        part = {key: data[key] for key in keys_of(Part) if key in data}
        return {**data, "part": part or None}

    def at(self, path: str) -> LockedFile:
        """The same file at a path of the bundle's folder."""
        return LockedFile(path, self.size or 0, self.sha256, self.upstream, self.origin)

    @property
    def expected(self) -> Expected:
        """What its bytes must be."""
        return Expected(self.origin, self.size, self.sha256, self.upstream)


@dataclass(frozen=True)
class Base:
    """The model an adapter was trained on, as its adapter_config.json names it."""

    repository: str
    revision: str


@dataclass(frozen=True)
class Code:
    """Python code of a repository that loading the asset runs (`allow_code` in the manifest).

    Attributes:
        repository: the asset's own, or another that its config refers to.
        files: payload paths.
    """

    repository: str
    commit: str = field(metadata=described(convert=commit_digits))
    licence: str | None
    files: tuple[str, ...] = field(metadata=described(order=str))


EXCLUDED, NOT_INCLUDED = "excluded by the manifest", "not in the manifest's `include`"
"""Why a user's own patterns omit a file."""


@dataclass(frozen=True)
class LeftOut:
    """A file of the source that is not in the bundle, and why."""

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
        declared_rows: the number in the dataset's card; None if there is none.
    """

    shards: tuple[str, ...]
    rows: int | None = None
    schema: tuple[Column, ...] | None = None
    declared_rows: int | None = setting(None, is_optional=True)


@dataclass(frozen=True)
class PackageEntry:
    """One package of an environment. Its file at `url` is one that the asset is made from."""

    name: str
    version: str
    manager: str
    url: str


@dataclass(frozen=True)
class LockedEnvironment:
    """The packages of an environment.

    Attributes:
        platform: conda's name, `linux-64`.
        virtual_packages: of the node it was solved for: `__glibc` -> `2.28`.
        tree: digest of all its files, the same in every prefix; None until it is built.
    """

    platform: str
    virtual_packages: Mapping[str, str]
    packages: tuple[PackageEntry, ...]
    tree: str | None = setting(None, convert=sha256_digits)


def _request(found: Mapping[str, Any]) -> Mapping[str, Any]:
    for key, value in found.items():
        texts = value if isinstance(value, list) else []
        if isinstance(value, dict) or not all(isinstance(item, str) for item in texts):
            raise WrongValueError(
                f": `{key}` must be a text, a number, true or false, or a list of texts"
            )
    return found


def _by_origin(ingredient: Ingredient) -> tuple[str, str]:
    return ingredient.origin, ingredient.part.split if ingredient.part else ""


@dataclass(frozen=True)
class LockedAsset:
    """One named thing in a bundle.

    Attributes:
        kind: `model`, `tokenizer`, `dataset`, `metric`, `files` or `environment`.
        request: the manifest's entry, normalised. `fetch` compares it with the manifest, to see
            whether the lock is still up to date.
        aliases: other names of the repository, besides `source.location`.
        licence: as the repository states it (SPDX where the Hub uses it), or None.
        configs: for a dataset by splits, config -> split -> `LockedSplit`.
        made_from: the inputs of files with a `made_by`.
        made_with: the versions of pyarrow and Python, which decide the bytes of converted files.
        environment: None for other kinds.
        base: the model that an adapter needs; None also if that is no Hub repository.
        code: Python code among its files, by repository.
    """

    name: str
    kind: str = field(metadata=described(takes=Literal[tuple(FOLDERS)]))
    request: Mapping[str, Any] = field(metadata=described(convert=_request))
    source: Source
    files: tuple[LockedFile, ...] = field(metadata=described(order=_BY_PATH))
    left_out: tuple[LeftOut, ...] = setting((), order=_BY_PATH)
    aliases: tuple[str, ...] = setting((), is_optional=True, order=str)
    licence: str | None = None
    configs: Mapping[str, Mapping[str, LockedSplit]] = setting(dict)
    made_from: tuple[Ingredient, ...] = setting((), is_optional=True, order=_by_origin)
    made_with: Mapping[str, str] = setting(dict, is_optional=True)
    environment: LockedEnvironment | None = setting(None, is_optional=True)
    base: Base | None = setting(None, is_optional=True)
    code: tuple[Code, ...] = setting((), is_optional=True, order=attrgetter("repository"))

    @property
    def names(self) -> frozenset[str]:
        """Every name that a script may use for the repository."""
        return frozenset((self.source.location, *self.aliases))

    @property
    def is_as_published(self) -> bool:
        """Whether it is a dataset whose files are as published, instead of parquet by split."""
        return self.kind == "dataset" and not self.configs

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
        """Whether each digest, row count and schema is known, and all files were made once."""
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
        return tuple(
            sorted((f for asset in self.assets.values() for f in asset.files), key=_BY_PATH)
        )

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
        document = {"format": LOCK_FORMAT, "name": self.name, "assets": dict(self.assets)}
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


REMEDY = (
    "Take it from version control or from the bundle's origin; or move it away, and make it again "
    "with `stage lock`."
)
_OF_ONE_KIND = {"dataset": "configs", "environment": "environment"}


@dataclass(frozen=True)
class _LockKeys:
    """The keys of a lock."""

    name: str
    assets: dict[str, Any]


def read_lock(data: bytes, file: str) -> Lockfile:
    """Reads a lock.

    Args:
        data: the JSON text, UTF-8.
        file: its name, for messages.

    Raises:
        UsageError: not JSON, a newer format, or a field that is missing or of another type.
        PolicyError: a path that may not be in a bundle, or two that collide.
    """
    with about(file):
        reader = DocumentReader(REMEDY)
        document = reader.read(
            _LockKeys, read_document(data, file, "a lock", (LOCK_FORMAT,), REMEDY)
        )
        assets = {
            name: _asset(reader, name, document.assets[name]) for name in sorted(document.assets)
        }
        lock = Lockfile(document.name, assets)
        paths = [file.path for file in lock.files]
        check_collisions(paths, REMEDY)
        _check_named_files(reader, lock, set(paths))
    return lock


def _asset(reader: DocumentReader, name: str, data: Any) -> LockedAsset:
    where = ("assets", name)
    if problem := problem_with_asset_name(name):
        named = printable(name)
        raise PolicyError(f"the asset name {named} cannot be used: {problem}.", REMEDY)
    if isinstance(data, dict):
        others = {key for kind, key in _OF_ONE_KIND.items() if kind != data.get("kind")}
        data = {key: value for key, value in data.items() if key not in others} | {"name": name}
    asset = reader.read(LockedAsset, data, where)
    for key in ("left_out", _OF_ONE_KIND.get(asset.kind, "files")):
        if data.get(key) is None:
            raise reader.error("is missing", *where, key)
    if asset.source.is_repository and asset.source.commit is None:
        raise reader.error("is missing", *where, "source", "commit")
    check_paths([file.path for file in asset.files], REMEDY)
    for number, file in enumerate(asset.files):
        if not file.path.startswith(f"{asset.folder}/"):
            place = reader.named((*where, "files", number, "path"))
            path = printable(file.path)
            raise PolicyError(f"{place} {path} is outside its asset, {asset.folder}/.", REMEDY)
    return asset


def _check_named_files(reader: DocumentReader, lock: Lockfile, paths: set[str]) -> None:
    """Each shard that a split names, and each package of an environment, must be in the lock."""
    for asset in lock.assets.values():
        where = ("assets", asset.name)
        sources = {ingredient.origin for ingredient in asset.made_from}
        for package in asset.environment.packages if asset.environment else ():
            if package.url not in sources:
                raise reader.error(
                    f"names {package.url}, which is not in `made_from`",
                    *where,
                    "environment",
                    "packages",
                )
        for config, splits in asset.configs.items():
            for split, locked in splits.items():
                for shard in locked.shards:
                    if shard not in paths:
                        raise reader.error(
                            f"names {shard}, not a file here",
                            *where,
                            "configs",
                            config,
                            split,
                            "shards",
                        )
