"""A dataset request -> the parquet files of one config, each split in order.

Published parquet first; else the Hub's own conversion on `refs/convert/parquet`. Rows and schema are not known before
the footers are here; `fetch` reads them and completes the lock.
"""

from __future__ import annotations

from dataclasses import dataclass

from stage.errors import UsageError
from stage.lockfile import CARD, LeftOut, LockedAsset, LockedFile, LockedSplit, Source
from stage.manifest import DatasetRequest, as_lock_request
from stage.names import check_path
from stage.progress import Reporter
from stage.sources import parquet_layout
from stage.sources.hub import Hub, Repository
from stage.sources.parquet_layout import Layout
from stage.sources.selection import RemoteFile, locked_file

CONVERTED = "refs/convert/parquet"


@dataclass(frozen=True)
class _Chosen:
    """The config that travels: its splits, the files they are made of, and the commit these come from."""

    config: str
    splits: dict[str, list[str]]
    files: dict[str, RemoteFile]
    parquet_commit: str | None


def resolve_dataset(name: str, request: DatasetRequest, hub: Hub, reporter: Reporter, what: str) -> LockedAsset:
    """Pins the commit and finds the parquet files of the config and splits asked for.

    Raises:
        UsageError: no such repository, revision, config or split; no parquet; shards missing.
        PolicyError: a path that may not be in a bundle.
    """
    repository = hub.repository(what, "dataset", request.repository, request.revision)
    listing = {file.path: file for file in hub.files(what, repository)}
    chosen = _published(request, repository, listing, what) or _converted(request, repository, hub, what)
    if chosen.parquet_commit:
        reporter.note(f"{name}: taken from {CONVERTED}: config `{chosen.config}` is not published as parquet")
    splits = _pick_splits(request, chosen, repository.id, what)
    folder = f"data/datasets/{name}"
    locked: dict[str, LockedSplit] = {}
    files: list[LockedFile] = []
    declared = parquet_layout.declared_rows(repository.card.get("dataset_info"), chosen.config)
    for split, paths in splits.items():
        parquet_layout.check_shards_are_whole(paths, what)
        shards = [f"{folder}/{chosen.config}/{split}-{i:05d}-of-{len(paths):05d}.parquet" for i in range(len(paths))]
        locked[split] = LockedSplit(tuple(shards), declared_rows=declared.get(split))
        files += [locked_file(chosen.files[path], shard) for path, shard in zip(paths, shards, strict=True)]
    if "README.md" in listing:
        files.append(locked_file(listing["README.md"], f"{folder}/{CARD}"))
    for file in files:
        check_path(file.path, what)
    taken = {file.origin for file in files}
    return LockedAsset(
        name=name,
        kind="dataset",
        request=as_lock_request(request),
        source=Source("hub", repository.id, request.revision, repository.commit, chosen.parquet_commit),
        files=tuple(files),
        left_out=tuple(_left_out(f, chosen) for f in {**listing, **chosen.files}.values() if f.path not in taken),
        aliases=() if repository.id == request.repository else (request.repository,),
        licence=repository.licence,
        configs={chosen.config: locked},
    )


def _published(
    request: DatasetRequest, repository: Repository, listing: dict[str, RemoteFile], what: str
) -> _Chosen | None:
    """The config as the repository publishes it; None if it is not parquet there."""
    configs = repository.card.get("configs")
    paths = list(listing)
    layout = parquet_layout.from_card(configs, paths) if configs else parquet_layout.from_names(paths)
    config = request.config or (parquet_layout.default_config(configs, layout) if layout else None)
    if config is None and layout:
        raise _name_a_config(repository.id, layout, what)
    if config is None or config not in layout:
        return None
    return _Chosen(config, layout[config], listing, None)


def _converted(request: DatasetRequest, repository: Repository, hub: Hub, what: str) -> _Chosen:
    """The config as the Hub converted it."""
    try:
        converted = hub.repository(what, "dataset", repository.id, CONVERTED)
    except UsageError:
        raise UsageError(
            f"{what}: the dataset {repository.id} has no parquet"
            + (f" for config `{request.config}`" if request.config else "")
            + f", neither published nor converted by the Hub ({CONVERTED}).",
            "Check `config`; or bring the files yourself with `path:`.",
        ) from None
    files = {file.path: file for file in hub.files(what, converted)}
    layout = parquet_layout.from_conversion(list(files), what, request.config)
    config = request.config or parquet_layout.default_config(repository.card.get("configs"), layout)
    if config is None or config not in layout:
        raise _name_a_config(repository.id, layout, what, config)
    return _Chosen(config, layout[config], files, converted.commit)


def _name_a_config(id: str, layout: Layout, what: str, asked: str | None = None) -> UsageError:
    problem = f"has no config `{asked}`" if asked else "has several configs"
    shown = ", ".join(list(layout)[:20]) + (", ..." if len(layout) > 20 else "")
    return UsageError(f"{what}: the dataset {id} {problem}.", f"Write `config:` and one of: {shown}.")


def _pick_splits(request: DatasetRequest, chosen: _Chosen, id: str, what: str) -> dict[str, list[str]]:
    for split in request.splits:
        if split not in chosen.splits:
            raise UsageError(
                f"{what}: config `{chosen.config}` of {id} has no split `{split}`.",
                f"It has: {', '.join(chosen.splits)}.",
            )
    return {split: paths for split, paths in chosen.splits.items() if not request.splits or split in request.splits}


def _left_out(file: RemoteFile, chosen: _Chosen) -> LeftOut:
    in_config = any(file.path in paths for paths in chosen.splits.values())
    reason = "another split" if in_config else "another config" if file.path.endswith(".parquet") else "not parquet"
    return LeftOut(file.path, file.size, reason)
