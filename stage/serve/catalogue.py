"""The contents of a bundle by the names that clients use: repository ids and paths in repositories.

A repository may be in a bundle twice (a model and its tokenizer, two configs of a dataset): the
same commit is one version with the files of both. Each version has the names that the manifest
asked for, and no other. A dataset whose files are as published is listed whole, with the files that
were left out, because `load_dataset` chooses files by the list; a dataset of chosen splits gets a
card that names only these.

The Hub answers `bert-large-uncased` and `GOOGLE-BERT/bert-large-uncased` by a redirect to
`google-bert/bert-large-uncased`. A bundle knows only the names that were staged, so it goes by a
rule: a name without an owner is the one repository here that is called so; letter case is ignored.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from stage.bundle.bundle import Bundle
from stage.files import open_inside
from stage.hub.layout import CONVERSION_BRANCH
from stage.lock.model import LeftOut, LockedAsset, LockedFile
from stage.lock.yaml_lines import split_card

_UNKNOWN = "0" * 40  # the lock has no digest of a file that was left out
OWN = "bundle"  # the namespace of every asset under its own name: clients require one
CARD = "README.md"
MAIN = "main"
ENTRY_KEYS = {"models": "model", "datasets": "dataset", "spaces": "metric"}
"""Kind of repository -> its key in a manifest. The Spaces that scripts ask for are metrics."""
_KINDS = {
    "model": ("models",),
    "tokenizer": ("models",),
    "dataset": ("datasets",),
    "files": ("models", "datasets"),
    "metric": ("spaces",),
}
"""Kind of asset -> the kinds it is served as."""


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
    def listed(self) -> Mapping[str, ServedFile | None]:
        """What a list of the repository has, by path: its files, and None for each folder."""
        absent = {
            path: ServedFile(b"", left.size, _UNKNOWN, None, Path())
            for path, (asset, left) in self.left_out.items()
            if asset.is_as_published
        }
        files = {**absent, **self.files}
        folders = {str(folder) for path in files for folder in Path(path).parents} - {"."}
        return {**dict.fromkeys(folders), **files}

    @cached_property
    def metadata(self) -> dict[str, Any]:
        """The front matter of its README, as JSON has it; empty if there is none."""
        text = self.files[CARD].read().decode("utf-8", "replace") if CARD in self.files else ""
        front: dict[str, Any] = json.loads(json.dumps(split_card(text)[0], default=str))
        return front


@dataclass(frozen=True)
class ServedRepository:
    """A repository under its id; `main` is the first of `versions`, if it is one of them."""

    kind: str
    id: str
    versions: tuple[Version, ...]

    def version(self, revision: str) -> Version | None:
        """The version of a branch, a tag, or a commit, which may be shortened; never another."""
        for version in self.versions:
            # git's shortest abbreviation; fewer digits could be a name.
            is_short = len(revision) >= 7 and version.commit.startswith(revision)
            if revision in version.revisions or is_short:
                return version
        return None


@dataclass(frozen=True)
class Catalogue:
    """Everything that is served.

    Attributes:
        repositories: (`models`, `datasets` or `spaces`; id or alias) -> repository.
    """

    repositories: Mapping[tuple[str, str], ServedRepository]

    def find(self, kind: str, name: str) -> tuple[ServedRepository, str | None] | None:
        """The repository that a client means, and why it is this one, if the name is not in the
        lock. None: it is not here, or more than one could be meant.
        """
        if (exact := self.repositories.get((kind, name))) is not None:
            return exact, None
        same = {
            found.id: found
            for (k, id), found in self.repositories.items()
            if k == kind and id.lower() == name.lower()
        }
        if len(same) == 1:
            (found,) = same.values()
            return found, f"{name} is answered by {found.id}: letter case is ignored"
        several = self.namesakes(kind, name)
        if "/" in name or len(several) != 1:
            return None
        rule = f"{name} is answered by {several[0].id}: the only {ENTRY_KEYS[kind]} of that name"
        return several[0], rule

    def namesakes(self, kind: str, name: str) -> list[ServedRepository]:
        """The repositories of a Hub that have this name and any owner; letter case is ignored."""
        bare = name.rpartition("/")[2].lower()
        return [
            found
            for (k, id), found in self.repositories.items()
            if (k, id.lower().rpartition("/")[2]) == (kind, bare)
            and id == found.id
            and "/" in id
            and not id.startswith(f"{OWN}/")
        ]

    @property
    def names(self) -> Mapping[tuple[str, str], ServedRepository]:
        """`repositories`, and the names without an owner that mean one repository here."""
        bare = {
            (kind, several[0].id.rpartition("/")[2]): several[0]
            for kind, name in self.repositories
            if len(several := self.namesakes(kind, name)) == 1
        }
        return {**bare, **self.repositories}

    @property
    def own_names(self) -> list[str]:
        """Ids of the assets that did not come from a Hub."""
        ids = {found.id for found in self.repositories.values()}
        return sorted(id for id in ids if id.startswith(f"{OWN}/"))

    @staticmethod
    def of(bundle: Bundle) -> Catalogue:
        """The catalogue of a bundle."""
        groups: dict[tuple[str, str], list[LockedAsset]] = {}
        for asset in bundle.lock.assets.values():
            source, own = asset.source, f"{OWN}/{asset.name}"
            name = source.repository if source.is_repository else own
            for kind in _KINDS.get(asset.kind, ()):
                groups.setdefault((kind, name), []).append(asset)
        repositories = {key: _repository(*key, assets, bundle) for key, assets in groups.items()}
        for key, assets in groups.items():
            for asset in assets:
                for alias in (*asset.aliases, f"{OWN}/{asset.name}"):
                    repositories.setdefault((key[0], alias), repositories[key])
        return Catalogue(repositories)


def _repository(
    kind: str, name: str, assets: list[LockedAsset], bundle: Bundle
) -> ServedRepository:
    by_commit: dict[str, list[LockedAsset]] = {}
    for asset in assets:
        own = hashlib.sha256(f"{bundle.id} {asset.name}".encode()).hexdigest()[:40]
        by_commit.setdefault(asset.source.commit or own, []).append(asset)
    versions = [_version(commit, several, bundle.root) for commit, several in by_commit.items()]
    versions.sort(key=lambda version: MAIN not in version.revisions)
    return ServedRepository(kind, name, tuple(versions))


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
        card = _card(assets, files[CARD].read() if CARD in files else b"")
        files[CARD] = ServedFile(card, len(card), _git_sha1(card), None, root)
    absent = {path: left for path, left in left_out.items() if path not in files}
    return Version(commit, files, absent, frozenset(revisions))


def _name(file: LockedFile, asset: LockedAsset) -> str:
    """The path that clients use: in the repository; of a generated file, in the asset."""
    is_made = file.made_by or not asset.source.is_repository
    return file.path.removeprefix(f"{asset.folder}/") if is_made else file.origin


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


def _git_sha1(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def _card(assets: list[LockedAsset], original: bytes) -> bytes:
    configs: dict[str, dict[str, list[str]]] = {}
    for asset in assets:
        names = {file.path: _name(file, asset) for file in asset.files}
        for config, splits in asset.configs.items():
            files = {name: [names[s] for s in split.shards] for name, split in splits.items()}
            configs.setdefault(config, {}).update(files)
    made = {config for asset in assets if asset.made_from for config in asset.configs}
    return card_of(original.decode("utf-8", "replace"), configs, made)


def card_of(
    original: str, configs: Mapping[str, Mapping[str, list[str]]], made: Collection[str] = ()
) -> bytes:
    """The card of a dataset, reduced to the configs and splits in the bundle.

    `load_dataset` reads the YAML at the top of README.md: `configs` names the files of each split,
    and `dataset_info` names the expected splits and features (github.com/huggingface/datasets,
    `utils/metadata.py`).

    Args:
        original: the published card; empty if there is none.
        configs: config -> split -> paths as they are served.
        made: the configs that `fetch` converted. The card's features describe the published files,
            so they are dropped: the parquet has its own.
    """
    metadata, text = split_card(original)
    published = {_config(entry): entry for entry in _entries(metadata.get("configs"))}
    metadata["configs"] = [
        {
            **_without(published.get(config, {}), "data_files", "data_dir"),
            "config_name": config,
            "data_files": [{"split": split, "path": files} for split, files in splits.items()],
        }
        for config, splits in configs.items()
    ]
    infos = []
    for info in _entries(metadata.pop("dataset_info", None)):
        if (config := _config(info)) in configs:
            if isinstance(info.get("splits"), list):
                known = configs[config]
                info["splits"] = [s for s in _entries(info["splits"]) if s.get("name") in known]
            gone = ("download_size", "dataset_size", *(["features"] if config in made else []))
            infos.append(_without(info, *gone))
    if infos:
        metadata["dataset_info"] = infos
    front = yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True)
    return f"---\n{front}---\n{text}".encode()


def _config(entry: Mapping[str, Any]) -> Any:
    return entry.get("config_name", "default")


def _entries(value: Any) -> list[dict[str, Any]]:
    several = value if isinstance(value, list) else [value]
    return [dict(entry) for entry in several if isinstance(entry, dict)]


def _without(mapping: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in mapping.items() if key not in keys}
