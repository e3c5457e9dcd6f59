"""A dataset request -> one config of a repository, each split's files in order.

Published parquet first; else the Hub's own conversion on `refs/convert/parquet`; else the files as they are published
(CSV, JSON, text, Arrow, images), which `stage.making` makes parquet of. Rows and schema are not known before the bytes
are here; `fetch` reads them and completes the lock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from stage.asset import CARD, Ingredient, LeftOut, LockedAsset, LockedFile, LockedSplit, Part, Source
from stage.disk import human_count
from stage.errors import PolicyError, UsageError
from stage.names import check_path, folded, is_split_name, printable, problem_with_path
from stage.progress import Reporter
from stage.request import DatasetRequest, as_lock_request, way_without
from stage.sources import parquet_layout
from stage.sources.hub import Hub, Repository
from stage.sources.original_layout import Originals, loading_script, originals
from stage.sources.selection import RemoteFile, ingredient_of, is_document, locked_file

CONVERTED = "refs/convert/parquet"


@dataclass(frozen=True)
class _Chosen:
    """The config that travels: its splits and the files they are made of.

    Attributes:
        parquet_commit: of `refs/convert/parquet`, where the files come from there.
        originals: how to convert the files; None: they are parquet.
    """

    config: str
    splits: Mapping[str, list[str]]
    files: Mapping[str, RemoteFile]
    parquet_commit: str | None = None
    originals: Originals | None = None


def resolve_dataset(name: str, request: DatasetRequest, hub: Hub, reporter: Reporter, what: str) -> LockedAsset:
    """Pins the commit and finds the files of the config and splits asked for.

    Raises:
        UsageError: no such repository, revision, config or split; no files that can be taken; shards missing.
        PolicyError: a path that may not be in a bundle; a dataset that only its own code can make.
    """
    repository = hub.repository(what, "dataset", request.repository, request.revision)
    listing = {file.path: file for file in hub.files(what, repository)}
    chosen = _choose(request, repository, listing, hub, what)
    if chosen.parquet_commit:
        reporter.note(f"{name}: taken from {CONVERTED}: config `{chosen.config}` is not published as parquet")
    splits = _pick_splits(request, chosen, repository.id, what)
    if chosen.originals:
        count = human_count(sum(map(len, splits.values())), f"{chosen.originals.convert} file")
        reporter.note(
            f"{name}: config `{chosen.config}` is neither published as parquet nor converted by the Hub: "
            f"made here from its {count}"
        )
        if request.separator is not None:
            chosen = replace(chosen, originals=replace(chosen.originals, separator=request.separator))
    if request.separator is not None and (chosen.originals is None or chosen.originals.convert != "csv"):
        raise UsageError(
            f"{what}: `separator`: config `{chosen.config}` is not made from CSV files.", "Take that line out."
        )
    asset = LockedAsset(
        name=name,
        kind="dataset",
        request=as_lock_request(request),
        source=Source("hub", repository.id, request.revision, repository.commit, chosen.parquet_commit),
        files=(),
        aliases=() if repository.id == request.repository else (request.repository,),
        licence=repository.licence,
    )
    return _with_files(asset, chosen, splits, repository, listing, what)


def _with_files(
    asset: LockedAsset,
    chosen: _Chosen,
    splits: Mapping[str, list[str]],
    repository: Repository,
    listing: Mapping[str, RemoteFile],
    what: str,
) -> LockedAsset:
    declared = parquet_layout.declared_rows(repository.card.get("dataset_info"), chosen.config)
    locked: dict[str, LockedSplit] = {}
    files: list[LockedFile] = []
    made_from: list[Ingredient] = []
    for split, paths in splits.items():
        if not is_split_name(split):
            raise PolicyError(f"{what}: {printable(split)} cannot name a split: it names files in the bundle.")
        parquet_layout.check_shards_are_whole(paths, what)
        shards = [
            f"{asset.folder}/{chosen.config}/{split}-{i:05d}-of-{len(paths):05d}.parquet" for i in range(len(paths))
        ]
        if chosen.originals:
            part = Part(split, chosen.originals.convert, chosen.originals.separator)
            made_from += [replace(ingredient_of(chosen.files[path]), part=part) for path in paths]
            locked[split] = LockedSplit((), declared_rows=declared.get(split))
        else:
            files += [locked_file(chosen.files[path], shard) for path, shard in zip(paths, shards, strict=True)]
            locked[split] = LockedSplit(tuple(shards), declared_rows=declared.get(split))
        for shard in shards[:1]:
            check_path(shard, what, way_without(asset.request))
    documents = _documents(listing)
    files += [locked_file(listing[path], f"{asset.folder}/{path}") for path in documents]
    if "README.md" in listing:
        files.append(locked_file(listing["README.md"], f"{asset.folder}/{CARD}"))
    taken = {file.origin for file in files} | {ingredient.origin for ingredient in made_from}
    rest = [file for file in {**listing, **chosen.files}.values() if file.path not in taken]
    return replace(
        asset,
        files=tuple(files),
        made_from=tuple(made_from),
        configs={chosen.config: locked},
        left_out=tuple(_left_out(file, chosen) for file in rest),
    )


def _documents(paths: Iterable[str]) -> list[str]:
    """The licence files and the like, but for those whose name may not be in a bundle: a dataset's entry has no
    `exclude` for them, and its rows are what it is asked for."""
    found = sorted(path for path in paths if is_document(path) and not path.lower().startswith("readme"))
    return list({folded(path): path for path in found if problem_with_path(path) is None}.values())


def _choose(
    request: DatasetRequest, repository: Repository, listing: Mapping[str, RemoteFile], hub: Hub, what: str
) -> _Chosen:
    """The config asked for, in the best form it is to be had in."""
    configs = repository.card.get("configs")
    paths = list(listing)
    declared = bool(parquet_layout.entries(configs))
    published = parquet_layout.from_card(configs, paths) if declared else parquet_layout.from_names(paths)
    script = loading_script(repository.id, paths)
    own = {} if script or (published and not declared) else originals(configs, paths)
    names = {**own, **published}
    config = request.config or parquet_layout.default_config(configs, names)
    if config in published:
        return _Chosen(config, published[config], listing)
    if config is None and names:
        raise _name_a_config(repository.id, names, what)
    # What names alone suggest is called `default`; the Hub's conversion may call its only config otherwise.
    converted, partial = _converted(config if declared else request.config, repository, hub, what)
    if isinstance(converted, _Chosen):
        return converted
    if script and not converted:
        raise PolicyError(
            f"{what}: the dataset {repository.id} is made by code of its own ({script}), and has no parquet. "
            "Airlift runs no code of a dataset, nor does `datasets` since version 4.",
            "Ask its owner for parquet (on the Hub: its discussions), or make it yourself and bring it with `path:`.",
        )
    if config in own and own[config].problem is None:
        return _Chosen(config, own[config].splits, listing, originals=own[config])
    if partial:
        raise partial
    if (every := {**own, **published, **dict.fromkeys(converted)}) and config not in every:
        raise _name_a_config(repository.id, every, what, config)
    problem = own[config].problem if config in own else None
    raise UsageError(
        f"{what}: the dataset {repository.id} has no parquet"
        + (f" for config `{config}`" if config else "")
        + f", neither published nor converted by the Hub ({CONVERTED})"
        + (f", and cannot be converted here: {problem}." if problem else ", nor files that could be converted."),
        "Check `config`; or get the files yourself (hf download) and bring them with `path:`.",
    )


def _converted(
    config: str | None, repository: Repository, hub: Hub, what: str
) -> tuple[_Chosen | tuple[str, ...], UsageError | None]:
    """The config as the Hub converted it; else the configs that it converted, and why not this one."""
    try:
        converted = hub.repository(what, "dataset", repository.id, CONVERTED)
    except UsageError:
        return (), None
    files = {file.path: file for file in hub.files(what, converted)}
    try:
        layout = parquet_layout.from_conversion(list(files), what, config)
    except UsageError as error:
        return tuple(parquet_layout.from_conversion(list(files), what, "")), error
    config = config or parquet_layout.default_config(repository.card.get("configs"), layout)
    if config is None and layout:
        raise _name_a_config(repository.id, layout, what)
    if config is None or config not in layout:
        return tuple(layout), None
    return _Chosen(config, layout[config], files, converted.commit), None


def _name_a_config(id: str, layout: Mapping[str, object], what: str, asked: str | None = None) -> UsageError:
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
    if any(file.path in paths for paths in chosen.splits.values()):
        return LeftOut(file.path, file.size, "another split")
    if chosen.originals:
        return LeftOut(file.path, file.size, "not part of this config")
    return LeftOut(file.path, file.size, "another config" if file.path.endswith(".parquet") else "not parquet")
