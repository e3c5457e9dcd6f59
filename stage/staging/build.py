"""Makes the files that a bundle holds in another form than published: unpacked or converted.

What they are made from (an archive, CSV files, pickles, packages) is fetched to the workshop, a
folder beside the payload. The asset's source makes the files there; they go to the payload when
they have the digests of a complete lock. A new lock learns the digests. The workshop is emptied
then, so a file that is damaged later is made again from new downloads.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from stage.bundle.inspect import parquet_footer
from stage.digests import FileDigests, hash_file
from stage.download.http import together
from stage.errors import DamageError, UsageError
from stage.files import human_count
from stage.lock.model import Ingredient, LockedAsset, LockedSplit
from stage.staging.sources.source import AssetSource
from stage.staging.working_folder import WORKSHOP, Sharing, WorkFolder

_SHOWN_COLUMNS = 8


def build_asset(
    asset: LockedAsset, source: AssetSource[Any], folder: WorkFolder, sharing: Sharing
) -> tuple[LockedAsset, dict[str, FileDigests]]:
    """Makes the files of an asset that are not as published, and puts them in place.

    Returns:
        The asset with all its files; the digests of those made.

    Raises:
        StageError: what the source refuses.
        DamageError: the results differ from the lock.
    """
    root, reporter = folder.root, source.run.reporter
    workdir = root / WORKSHOP / asset.name
    out = workdir / "made"
    if out.exists():
        shutil.rmtree(out)
    inputs, ingredients = _fetch_inputs(asset, source, workdir / "originals", sharing)
    with reporter.at_work(f"make {asset.name}"):
        made, files = source.make(replace(asset, made_from=ingredients), inputs, out, root)
    where = {file.path: path for file, path in files}
    made = with_rows(made, where.__getitem__)
    _print_rows(made, source, is_csv=any(file.made_by == "csv" for file, _ in files))
    size = sum(path.stat().st_size for _, path in files)
    with reporter.bytes_bar(f"hash {asset.name}", size) as progress:
        digests = {file.path: hash_file(path, progress=progress) for file, path in files}
    known = [replace(f, size=digests[f.path].size, sha256=digests[f.path].sha256) for f, _ in files]
    complete = replace(made, files=(*(f for f in asset.files if not f.made_by), *known))
    _check_as_locked(asset, complete, source)
    folder.mark_unfinished({file.path for file, _ in files})
    for file, path in files:
        folder.put(file.path, path)
    shutil.rmtree(workdir, ignore_errors=True)
    return complete, digests


def _fetch_inputs(
    asset: LockedAsset, source: AssetSource[Any], folder: Path, sharing: Sharing
) -> tuple[dict[str, Path], tuple[Ingredient, ...]]:
    """Fetches what the files are made from: the paths by origin, and the digests of all."""
    run = source.run
    wanted = {i.origin: i for i in asset.made_from}  # a file may be in two splits
    with run.reporter.bytes_bar(
        f"fetch {asset.name}", sum(i.size or 0 for i in wanted.values())
    ) as progress:

        def fetch(ingredient: Ingredient) -> tuple[Path, FileDigests]:
            target = folder / source.input_name(ingredient.origin)
            if asset.environment is not None and not target.is_file():
                taken = sharing.take(ingredient.at(_in_bundle(target)), progress)
                if taken is not None:
                    return target, taken
            return source.fetch_input(asset, ingredient, folder, progress)

        stop, jobs = run.downloader.stop.set, run.options.jobs
        fetched = dict(zip(wanted, together(fetch, wanted.values(), jobs, stop), strict=True))
    digests = {origin: digests for origin, (_, digests) in fetched.items()}
    known = tuple(
        replace(i, size=digests[i.origin].size, sha256=digests[i.origin].sha256)
        for i in asset.made_from
    )
    count = human_count(len(fetched), "fetched or local file")
    run.reporter.detail(f"{asset.name}: made from {count}")
    if asset.environment is not None:  # the next image of it needs most of them again
        sharing.keep({_in_bundle(path): digests for path, digests in fetched.values()})
    return {origin: path for origin, (path, _) in fetched.items()}, known


def _in_bundle(path: Path) -> str:
    """The path in the bundle's folder of a file in `WORKSHOP/ASSET/originals`."""
    return "/".join(path.parts[-4:])


def with_rows(asset: LockedAsset, where: Callable[[str], Path]) -> LockedAsset:
    """The asset with the rows and the schema of each split whose lock has none yet.

    Args:
        where: path in the bundle of a shard -> its file.

    Raises:
        DamageError: a shard is no parquet file, shards differ in schema, or the card declares
            another number of rows.
    """
    configs = {
        config: {
            name: split
            if split.rows is not None and split.schema is not None
            else _with_footers(split, where, f"{asset.name}: {config}/{name}")
            for name, split in splits.items()
        }
        for config, splits in asset.configs.items()
    }
    return replace(asset, configs=configs)


def _with_footers(split: LockedSplit, where: Callable[[str], Path], what: str) -> LockedSplit:
    """A split with the rows and the schema that the footers of its shards state."""
    footers = [parquet_footer(where(shard)) for shard in split.shards]
    for shard, footer in zip(split.shards, footers, strict=True):
        if footer.schema != footers[0].schema:
            raise DamageError(
                f"{what}: {shard} has other columns than {split.shards[0]}.",
                "Try another revision.",
            )
    rows = sum(footer.rows for footer in footers)
    if split.declared_rows not in (None, rows):
        raise DamageError(
            f"{what}: {rows} rows in {human_count(len(footers), 'file')}; "
            f"the card says {split.declared_rows}.",
            "Files are missing from the repository, or its card is out of date: "
            "try another revision.",
        )
    return replace(split, rows=rows, schema=footers[0].schema)


def _print_rows(asset: LockedAsset, source: AssetSource[Any], *, is_csv: bool) -> None:
    """Prints rows and columns: one column instead of five must be seen here, not in a training run.

    Raises:
        UsageError: no row at all.
    """
    reporter, every = source.run.reporter, 0
    for config, splits in asset.configs.items():
        for name, split in splits.items():
            rows, columns = split.rows or 0, split.schema or ()
            every += rows
            shown = ", ".join(f"{c.name} {c.type}" for c in columns[:_SHOWN_COLUMNS])
            more = ", ..." if len(columns) > _SHOWN_COLUMNS else ""
            split_of = f"{asset.name}: {config}/{name}"
            reporter.note(
                f"{split_of}: {human_count(rows, 'row')}, "
                f"{human_count(len(columns), 'column')}: {shown}{more}"
            )
            if rows == 0:
                reporter.warn(f"{split_of}: has no row")
            elif is_csv and (value := next((c.name for c in columns if _is_value(c.name)), "")):
                reporter.warn(
                    f"{split_of}: a column is called {value!r}: the first line of a CSV is the "
                    "names; if it is a row here, write a line of names above it"
                )
            elif is_csv and len(columns) == 1:
                reporter.warn(
                    f"{split_of}: one column, called {columns[0].name!r}: "
                    "if this is text, write `convert: text`"
                )
    if asset.configs and every == 0:
        raise UsageError(
            f"{source.what}: not one row came out of {human_count(len(asset.made_from), 'file')}.",
            "Is it the right file, and the right `convert`? A CSV begins with a line of names; "
            "plain text is `convert: text`.",
        )


def _is_value(name: str) -> bool:
    """Whether a column's name is a number or a sentence: the line of names may be missing."""
    with suppress(ValueError):
        return math.isfinite(float(name))
    return " " in name.strip() and name.rstrip().endswith((".", "!"))


def _check_as_locked(before: LockedAsset, after: LockedAsset, source: AssetSource[Any]) -> None:
    """Checks that the same bytes result as the lock states."""
    locked = {file.path: file.sha256 for file in before.files if file.made_by}
    made = {file.path: file.sha256 for file in after.files if file.made_by}
    different = sorted(path for path in {*locked, *made} if locked.get(path) != made.get(path))
    if locked and different:
        manifest = source.run.manifest
        raise DamageError(
            f"{before.name}: made again, {different[0]} differs from {manifest.lock_path.name} "
            f"({len(different)} of {len(made)} files).",
            f"{source.what_decides_bytes}: use the versions that the lock was made with, or accept "
            f"new digests: {manifest.update_command(before.name)}",
        )
