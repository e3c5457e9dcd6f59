"""What only the fetched bytes tell, filled into the lock: digests nobody published, rows and columns of parquet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from stage.asset import LockedSplit
from stage.digest import FileDigests
from stage.disk import human_count
from stage.errors import DamageError
from stage.inspect import parquet_footer
from stage.lockfile import Lockfile


def completed(lock: Lockfile, digests: Mapping[str, FileDigests], root: Path) -> Lockfile:
    """The lock with every sha256, row count and schema filled in.

    Args:
        digests: by payload path, of every file.

    Raises:
        DamageError: a shard is no parquet, shards differ in schema, or rows are not what the card declares.
    """
    for asset in lock.assets.values():
        files = tuple(replace(file, sha256=digests[file.path].sha256) for file in asset.files)
        configs = {
            config: {
                name: _with_footers(split, root, f"{asset.name}: {config}/{name}") for name, split in splits.items()
            }
            for config, splits in asset.configs.items()
        }
        lock = lock.with_asset(replace(asset, files=files, configs=configs))
    return lock


def _with_footers(split: LockedSplit, root: Path, what: str) -> LockedSplit:
    """A split with the rows and schema its shards' footers state.

    Raises:
        DamageError: a shard is no parquet, shards differ in schema, or rows are not what the card declares.
    """
    footers = [parquet_footer(root / shard) for shard in split.shards]
    for shard, footer in zip(split.shards, footers, strict=True):
        if footer.schema != footers[0].schema:
            raise DamageError(f"{what}: {shard} has other columns than {split.shards[0]}.", "Try another revision.")
    rows = sum(footer.rows for footer in footers)
    if split.declared_rows not in (None, rows):
        raise DamageError(
            f"{what}: {rows} rows in {human_count(len(footers), 'file')}; the card says {split.declared_rows}.",
            "Files are missing from the repository, or its card is out of date: try another revision.",
        )
    return replace(split, rows=rows, schema=footers[0].schema)
