"""Reads a lock's JSON into `Lockfile`, and believes nothing.

A lock can come from anywhere (a mail, a mirror, a damaged disk), and its paths decide which files
are written and read. So the type of each field is checked. Each path must be one that
`stage.paths` allows, must be in its asset's folder, and must not collide with another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stage import paths as util_paths
from stage.errors import PolicyError, about
from stage.lock.document import DocumentReader, read_document
from stage.lock.model import LockedAsset
from stage.lock.write import FORMAT, Lockfile

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
        document = reader.read(_LockKeys, read_document(data, file, "a lock", (FORMAT,), REMEDY))
        assets = {
            name: _asset(reader, name, document.assets[name]) for name in sorted(document.assets)
        }
        lock = Lockfile(document.name, assets)
        paths = [file.path for file in lock.files]
        util_paths.check_collisions(paths, REMEDY)
        _check_named_files(reader, lock, set(paths))
    return lock


def _asset(reader: DocumentReader, name: str, data: Any) -> LockedAsset:
    where = ("assets", name)
    if problem := util_paths.problem_with_asset_name(name):
        named = util_paths.printable(name)
        raise PolicyError(f"the asset name {named} cannot be used: {problem}.", REMEDY)
    if isinstance(data, dict):
        others = {key for kind, key in _OF_ONE_KIND.items() if kind != data.get("kind")}
        data = {key: value for key, value in data.items() if key not in others} | {"name": name}
    asset = reader.read(LockedAsset, data, where)
    for key in ("left_out", _OF_ONE_KIND.get(asset.kind, "files")):
        if data.get(key) is None:
            raise reader.error("is missing", *where, key)
    if asset.source.type == "hub" and asset.source.commit is None:
        raise reader.error("is missing", *where, "source", "commit")
    util_paths.check_paths([file.path for file in asset.files], REMEDY)
    for number, file in enumerate(asset.files):
        if not file.path.startswith(f"{asset.folder}/"):
            place = reader.named((*where, "files", number, "path"))
            path = util_paths.printable(file.path)
            raise PolicyError(f"{place} {path} is outside its asset, {asset.folder}/.", REMEDY)
    return asset


def _check_named_files(reader: DocumentReader, lock: Lockfile, paths: set[str]) -> None:
    """Each shard that a split names, and each package of an environment, must be in the lock."""
    for asset in lock.assets.values():
        where = ("assets", asset.name)
        sources = {ingredient.origin for ingredient in asset.made_from}
        for package in asset.environment.packages if asset.environment else ():
            if package.url not in sources:
                problem = f"names {package.url}, which is not in `made_from`"
                raise reader.error(problem, *where, "environment", "packages")
        for config, splits in asset.configs.items():
            for split, locked in splits.items():
                for shard in locked.shards:
                    if shard not in paths:
                        problem = f"names {shard}, not a file here"
                        raise reader.error(problem, *where, "configs", config, split, "shards")
