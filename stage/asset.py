"""One named thing of a bundle, exactly: where it comes from, its files, what they were made of. Data; no text, no disk.

`lockfile` writes it as JSON, `lockreader` reads it back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stage.digest import Digest

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
        convert: how it is read, one of `request.CONVERSIONS`.
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


EXCLUDED, NOT_INCLUDED = "excluded by the manifest", "not in the manifest's `include`"
"""Why a file does not travel that a person's own patterns leave behind."""


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
