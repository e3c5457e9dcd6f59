"""Rows as parquet: the files of a `path:` or `url:` entry, or of a Hub dataset, converted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from stage.convert.convert import CONFIG, Split, convert
from stage.hub.layout import splits_of_names
from stage.lock.model import LockedAsset, LockedFile, LockedSplit
from stage.lock.requests import PathRequest, UrlRequest
from stage.staging.sources.source import AssetSource, Made


def converted(
    source: AssetSource[PathRequest] | AssetSource[UrlRequest],
    asset: LockedAsset,
    how: str,
    inputs: Mapping[str, Path],
    out: Path,
) -> Made:
    """Converts files, whose names say which split they are of.

    Raises:
        StageError: as for `convert`.
    """
    splits = convert(
        how,
        inputs,
        splits_of_names,
        out,
        source.what,
        source.request.separator,
        lambda said: source.run.reporter.note(f"{asset.name}: {said}"),
    )
    return in_config(asset, CONFIG, how, splits)


def in_config(asset: LockedAsset, config: str, how: str, splits: Mapping[str, Split]) -> Made:
    """The asset with converted splits as one config of it."""
    folder = f"{asset.folder}/{config}"
    before = asset.configs.get(config, {})
    locked = {
        name: LockedSplit(
            tuple(f"{folder}/{shard.name}" for shard in split.shards),
            declared_rows=before[name].declared_rows if name in before else None,
        )
        for name, split in splits.items()
    }
    files = [
        (LockedFile(f"{folder}/{shard.name}", 0, None, None, split.origin, how), shard)
        for split in splits.values()
        for shard in split.shards
    ]
    return replace(asset, configs={config: locked}), files
