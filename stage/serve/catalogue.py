"""What a bundle has, by the names clients use: repository ids and the paths files have there.

Lock -> `Catalogue`. A repository may be in a bundle twice (a model and its tokenizer, two configs of a dataset): the
same commit is one version with the files of both. Datasets get a card that names just what travelled, or
`load_dataset` would look for splits that stayed behind.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from stage.asset import CARD as STAGED_CARD
from stage.asset import LockedAsset, LockedFile
from stage.bundle import Bundle
from stage.serve.card import CARD, card_of

CONVERTED = "refs/convert/parquet"
DEFAULT_REVISION = "main"
OWN = "bundle"  # the namespace of every asset under its own name: clients insist on one


@dataclass(frozen=True)
class ServedFile:
    """A file of a repository.

    Attributes:
        content: where it lies, or its bytes where it was written for this server.
        git_sha1: of the blob that git has: of the file, or of its LFS pointer.
        lfs_sha256: None for a file that is no LFS file on the Hub.
    """

    content: Path | bytes
    size: int
    git_sha1: str
    lfs_sha256: str | None

    @property
    def etag(self) -> str:
        """As the Hub's: the sha256 of an LFS file, else the git blob's sha1."""
        return self.lfs_sha256 or self.git_sha1


@dataclass(frozen=True)
class Version:
    """A repository at one commit: the files of it that travelled, and why others did not."""

    commit: str
    files: Mapping[str, ServedFile]
    left_out: Mapping[str, str]
    revisions: frozenset[str]


@dataclass(frozen=True)
class ServedRepository:
    """A repository under its id; `versions` has the default one first."""

    kind: str
    id: str
    versions: tuple[Version, ...]

    def version(self, revision: str) -> Version | None:
        """The version a branch, tag or commit means; `main` is whatever was staged."""
        for version in self.versions:
            if revision in version.revisions or (len(revision) >= 7 and version.commit.startswith(revision)):
                return version
        return self.versions[0] if revision == DEFAULT_REVISION else None


@dataclass(frozen=True)
class Catalogue:
    """All that is served: (`models` or `datasets`, id) -> repository; and payload path -> file of environments."""

    repositories: Mapping[tuple[str, str], ServedRepository]
    packages: Mapping[str, LockedFile]
    root: Path

    @property
    def own_names(self) -> list[str]:
        """Ids of what did not come from a Hub."""
        return sorted(
            {id for (_, id), found in self.repositories.items() if found.id == id and id.startswith(f"{OWN}/")}
        )

    @staticmethod
    def of(bundle: Bundle) -> Catalogue:
        """Lays out a bundle."""
        groups: dict[tuple[str, str], list[LockedAsset]] = {}
        for asset in bundle.lock.assets.values():
            for kind in _kinds(asset):
                groups.setdefault((kind, _id(asset)), []).append(asset)
        repositories = {key: _repository(*key, assets, bundle) for key, assets in groups.items()}
        for key, assets in groups.items():
            for alias in (name for asset in assets for name in (*asset.aliases, f"{OWN}/{asset.name}")):
                repositories.setdefault((key[0], alias), repositories[key])
        environments = [a for a in bundle.lock.assets.values() if a.kind == "environment"]
        return Catalogue(repositories, {f.path: f for a in environments for f in a.files}, bundle.root)


def _kinds(asset: LockedAsset) -> tuple[str, ...]:
    """What it is served as; files may be either, and nobody but the client knows."""
    kinds = {"model": ("models",), "tokenizer": ("models",), "dataset": ("datasets",), "files": ("models", "datasets")}
    return kinds.get(asset.kind, ())


def _id(asset: LockedAsset) -> str:
    return asset.source.repository if asset.source.type == "hub" else f"{OWN}/{asset.name}"


def _repository(kind: str, name: str, assets: list[LockedAsset], bundle: Bundle) -> ServedRepository:
    by_commit: dict[str, list[LockedAsset]] = {}
    for asset in assets:
        own = hashlib.sha256(f"{bundle.id} {asset.name}".encode()).hexdigest()[:40]
        by_commit.setdefault(asset.source.commit or own, []).append(asset)
    versions = [_version(commit, several, bundle.root) for commit, several in by_commit.items()]
    return ServedRepository(kind, name, tuple(sorted(versions, key=lambda v: DEFAULT_REVISION not in v.revisions)))


def _version(commit: str, assets: list[LockedAsset], root: Path) -> Version:
    files: dict[str, ServedFile] = {}
    left_out: dict[str, str] = {}
    revisions = {commit}
    for asset in assets:
        for file in asset.files:
            files[_name(file, asset)] = _served(file, root)
        left_out |= {left.path: left.reason for left in asset.left_out}
        revisions.add(asset.source.requested_revision or DEFAULT_REVISION)
        if asset.kind == "dataset":
            revisions |= {CONVERTED, asset.source.parquet_commit or commit}
    if any(asset.kind == "dataset" for asset in assets):
        files[CARD] = _card(assets, files.get(CARD))
    return Version(commit, files, {p: why for p, why in left_out.items() if p not in files}, frozenset(revisions))


def _name(file: LockedFile, asset: LockedAsset) -> str:
    """What a client calls a file: its path in the repository, or in the bundle if it was made on the way."""
    inside = file.path.removeprefix(f"{asset.folder}/")
    if file.made_by or asset.source.type != "hub":
        return inside
    return CARD if asset.kind == "dataset" and inside == STAGED_CARD else file.origin


def _served(file: LockedFile, root: Path) -> ServedFile:
    if file.upstream is not None and file.upstream.algorithm == "git-sha1":
        return ServedFile(root / file.path, file.size, file.upstream.value, None)
    sha256 = file.sha256 or ""
    # git-lfs, docs/spec.md
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {file.size}\n".encode()
    return ServedFile(root / file.path, file.size, _git_sha1(pointer), sha256)


def _card(assets: list[LockedAsset], original: ServedFile | None) -> ServedFile:
    text = original.content.read_bytes() if original is not None and isinstance(original.content, Path) else b""
    configs: dict[str, dict[str, list[str]]] = {}
    for asset in assets:
        names = {file.path: _name(file, asset) for file in asset.files}
        for config, splits in asset.configs.items():
            mine = configs.setdefault(config, {})
            mine |= {split: [names[shard] for shard in locked.shards] for split, locked in splits.items()}
    made = {config for asset in assets if asset.made_from for config in asset.configs}
    card = card_of(text.decode("utf-8", "replace"), configs, made)
    return ServedFile(card, len(card), _git_sha1(card), None)


def _git_sha1(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
