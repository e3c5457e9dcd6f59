"""The contents of a bundle by the names that clients use: repository ids and paths in repositories.

A repository may be in a bundle twice (a model and its tokenizer, two configs of a dataset): the
same commit is one version with the files of both. Each version has the names that the manifest
asked for, and no other. A dataset whose files are as published is listed whole, with the files that
were left out, because `load_dataset` chooses files by the list; a dataset of chosen splits gets a
card that names only these.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from stage.bundle.bundle import Bundle
from stage.files import open_inside
from stage.hub.parquet_layout import CONVERSION_BRANCH
from stage.lock.model import LeftOut, LockedAsset, LockedFile
from stage.lock.yaml_lines import split_card
from stage.serve.address import MAIN
from stage.serve.card import CARD, card_of

_UNKNOWN = "0" * 40  # the lock has no digest of a file that was left out
OWN = "bundle"  # the namespace of every asset under its own name: clients require one


@dataclass(frozen=True)
class ServedFile:
    """A file of a repository.

    Attributes:
        content: its path on disk, or its bytes if it is generated here.
        size: bytes.
        git_sha1: of the git blob: the file, or its LFS pointer.
        lfs_sha256: None for a file that is not an LFS file on the Hub.
        root: the bundle's folder.
    """

    content: Path | bytes
    size: int
    git_sha1: str
    lfs_sha256: str | None
    root: Path

    @property
    def etag(self) -> str:
        """The Hub's ETag: the sha256 of an LFS file, else the git blob's sha1."""
        return self.lfs_sha256 or self.git_sha1

    @property
    def pointer(self) -> bytes | None:
        """The LFS pointer, which is the file in git; None for a file that is not an LFS file."""
        return _pointer(self.lfs_sha256, self.size) if self.lfs_sha256 else None

    def read(self) -> bytes:
        """The content; empty if it cannot be read."""
        if isinstance(self.content, bytes):
            return self.content
        try:
            with open_inside(self.root, self.content) as file:
                return file.read()
        except OSError:
            return b""


@dataclass(frozen=True)
class Version:
    """A repository at one commit.

    Attributes:
        files: path in the repository -> file.
        left_out: path of a file that is not in the bundle -> the asset that left it out, and why.
        revisions: the names of this version: its commit, branches, tags.
    """

    commit: str
    files: Mapping[str, ServedFile]
    left_out: Mapping[str, tuple[LockedAsset, LeftOut]]
    revisions: frozenset[str]

    @cached_property
    def listed(self) -> Mapping[str, ServedFile]:
        """The files that a list of the repository has."""
        absent = {
            path: ServedFile(b"", left.size, _UNKNOWN, None, Path())
            for path, (asset, left) in self.left_out.items()
            if asset.is_as_published
        }
        return {**absent, **self.files}

    @cached_property
    def metadata(self) -> dict[str, Any]:
        """The front matter of its README, as JSON has it; empty if there is none."""
        card = self.files.get(CARD)
        text = card.read().decode("utf-8", "replace") if card else ""
        found = json.loads(json.dumps(split_card(text)[0], default=str))
        return found if isinstance(found, dict) else {}


@dataclass(frozen=True)
class ServedRepository:
    """A repository under its id; `main` is the first of `versions`, if it is one of them."""

    kind: str
    id: str
    versions: tuple[Version, ...]

    def version(self, revision: str) -> Version | None:
        """The version of a branch, a tag, or a commit, which may be shortened; never another."""
        for version in self.versions:
            if revision in version.revisions:
                return version
        if len(revision) < 7:
            return None
        return next((v for v in self.versions if v.commit.startswith(revision)), None)

    def has(self, revision: str) -> bool:
        """Whether a name is that of a version."""
        return self.version(revision) is not None


@dataclass(frozen=True)
class Catalogue:
    """Everything that is served.

    Attributes:
        repositories: (`models`, `datasets` or `spaces`; id or alias) -> repository.
    """

    repositories: Mapping[tuple[str, str], ServedRepository]

    @cached_property
    def by_bare_name(self) -> Mapping[tuple[str, str], tuple[ServedRepository, ...]]:
        """(kind, name without owner, in lower case) -> the repositories of a Hub called so."""
        groups: dict[tuple[str, str], list[ServedRepository]] = {}
        for (kind, name), found in self.repositories.items():
            owner, _, bare = name.rpartition("/")
            if name == found.id and owner not in ("", OWN):
                groups.setdefault((kind, bare.lower()), []).append(found)
        return {key: tuple(found) for key, found in groups.items()}

    @cached_property
    def by_case(self) -> Mapping[tuple[str, str], tuple[ServedRepository, ...]]:
        """(kind, id or alias in lower case) -> the repositories."""
        groups: dict[tuple[str, str], dict[int, ServedRepository]] = {}
        for (kind, name), found in self.repositories.items():
            groups.setdefault((kind, name.lower()), {})[id(found)] = found
        return {key: tuple(found.values()) for key, found in groups.items()}

    @property
    def names(self) -> Mapping[tuple[str, str], ServedRepository]:
        """`repositories`, and the names without an owner that mean one repository here."""
        bare = {
            (kind, found[0].id.rpartition("/")[2]): found[0]
            for (kind, _), found in self.by_bare_name.items()
            if len(found) == 1
        }
        return {**bare, **self.repositories}

    @property
    def own_names(self) -> list[str]:
        """Ids of the assets that did not come from a Hub."""
        return sorted(
            {
                id
                for (_, id), found in self.repositories.items()
                if found.id == id and id.startswith(f"{OWN}/")
            }
        )

    @staticmethod
    def of(bundle: Bundle) -> Catalogue:
        """The catalogue of a bundle."""
        groups: dict[tuple[str, str], list[LockedAsset]] = {}
        for asset in bundle.lock.assets.values():
            for kind in _kinds(asset):
                groups.setdefault((kind, _id(asset)), []).append(asset)
        repositories = {key: _repository(*key, assets, bundle) for key, assets in groups.items()}
        for key, assets in groups.items():
            for alias in (
                name for asset in assets for name in (*asset.aliases, f"{OWN}/{asset.name}")
            ):
                repositories.setdefault((key[0], alias), repositories[key])
        return Catalogue(repositories)


def _kinds(asset: LockedAsset) -> tuple[str, ...]:
    """The kinds an asset is served as; a `files` asset may be a model or a dataset."""
    kinds = {
        "model": ("models",),
        "tokenizer": ("models",),
        "dataset": ("datasets",),
        "files": ("models", "datasets"),
        "metric": ("spaces",),
    }
    return kinds.get(asset.kind, ())


def _id(asset: LockedAsset) -> str:
    return asset.source.repository if asset.source.type == "hub" else f"{OWN}/{asset.name}"


def _repository(
    kind: str, name: str, assets: list[LockedAsset], bundle: Bundle
) -> ServedRepository:
    by_commit: dict[str, list[LockedAsset]] = {}
    for asset in assets:
        own = hashlib.sha256(f"{bundle.id} {asset.name}".encode()).hexdigest()[:40]
        by_commit.setdefault(asset.source.commit or own, []).append(asset)
    versions = [_version(commit, several, bundle.root) for commit, several in by_commit.items()]
    return ServedRepository(
        kind, name, tuple(sorted(versions, key=lambda version: MAIN not in version.revisions))
    )


def _version(commit: str, assets: list[LockedAsset], root: Path) -> Version:
    files: dict[str, ServedFile] = {}
    left_out: dict[str, tuple[LockedAsset, LeftOut]] = {}
    revisions = {commit}
    for asset in assets:
        files |= {_name(file, asset): _served(file, root) for file in asset.files}
        left_out |= {left.path: (asset, left) for left in asset.left_out}
        revisions.add(asset.source.requested_revision or MAIN)
        if asset.configs:
            revisions |= {CONVERSION_BRANCH, asset.source.parquet_commit or commit}
    if all(asset.configs for asset in assets):
        files[CARD] = _card(assets, files.get(CARD), root)
    absent = {path: left for path, left in left_out.items() if path not in files}
    return Version(commit, files, absent, frozenset(revisions))


def _name(file: LockedFile, asset: LockedAsset) -> str:
    """The path that clients use: in the repository; of a generated file, in the asset."""
    inside = file.path.removeprefix(f"{asset.folder}/")
    if file.made_by or asset.source.type != "hub":
        return inside
    return file.origin


def _served(file: LockedFile, root: Path) -> ServedFile:
    if file.upstream is not None and file.upstream.algorithm == "git-sha1":
        return ServedFile(root / file.path, file.size, file.upstream.value, None, root)
    sha256 = file.sha256 or ""
    pointer = _pointer(sha256, file.size)
    return ServedFile(root / file.path, file.size, _git_sha1(pointer), sha256, root)


def _pointer(sha256: str, size: int) -> bytes:
    """The text that git has in place of an LFS file (git-lfs, docs/spec.md)."""
    version = "version https://git-lfs.github.com/spec/v1"
    return f"{version}\noid sha256:{sha256}\nsize {size}\n".encode()


def _card(assets: list[LockedAsset], original: ServedFile | None, root: Path) -> ServedFile:
    text = original.read() if original is not None else b""
    configs: dict[str, dict[str, list[str]]] = {}
    for asset in assets:
        names = {file.path: _name(file, asset) for file in asset.files}
        for config, splits in asset.configs.items():
            mine = configs.setdefault(config, {})
            mine |= {
                split: [names[shard] for shard in locked.shards] for split, locked in splits.items()
            }
    made = {config for asset in assets if asset.made_from for config in asset.configs}
    card = card_of(text.decode("utf-8", "replace"), configs, made)
    return ServedFile(card, len(card), _git_sha1(card), None, root)


def _git_sha1(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
