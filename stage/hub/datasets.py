"""Resolves a dataset request: the files that it names, as published, or one config by splits.

Of a config, published parquet comes first; else the Hub's own conversion on
`refs/convert/parquet`; else the published files (CSV, JSON, text, Arrow, images), which
`stage.staging.build` converts to parquet.
Rows and schema are known only after the download: `fetch` reads them and completes the lock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from stage.errors import PolicyError, UsageError, suggest
from stage.files import human_count
from stage.hub import parquet_layout
from stage.hub.client import Hub, Repository
from stage.hub.data_files_layout import Originals, loading_script, originals
from stage.hub.model_files import (
    RemoteFile,
    ingredient_of,
    is_document,
    locked_file,
    select_by_patterns,
)
from stage.hub.parquet_layout import CONVERSION_BRANCH
from stage.lock.model import (
    CARD,
    Code,
    Ingredient,
    LeftOut,
    LockedAsset,
    LockedFile,
    LockedSplit,
    Part,
    Source,
)
from stage.lock.requests import DatasetRequest, as_lock_request, way_without
from stage.paths import check_path, folded, is_split_name, printable, problem_with_path
from stage.progress import Reporter


@dataclass(frozen=True)
class Conversion:
    """The Hub's own conversion to parquet: its commit and its files by path."""

    commit: str
    files: Mapping[str, RemoteFile]


def find_conversion(hub: Hub, dataset: Repository, what: str) -> Conversion | None:
    """The Hub's own conversion of a dataset; None if there is none.

    Raises:
        IncompleteError: the Hub cannot be reached.
    """
    try:
        converted = hub.repository(what, "dataset", dataset.id, CONVERSION_BRANCH)
    except UsageError:
        return None
    return Conversion(converted.commit, hub.files(what, converted))


@dataclass(frozen=True)
class _Chosen:
    """The config to fetch.

    Attributes:
        splits: split -> paths in order.
        files: path -> file, for all files of the listing that the paths come from.
        parquet_commit: the commit of `refs/convert/parquet`, where the files come from there.
        originals: how to convert the files; None: they are parquet.
    """

    config: str
    splits: Mapping[str, list[str]]
    files: Mapping[str, RemoteFile]
    parquet_commit: str | None = None
    originals: Originals | None = None


def resolve_dataset(
    name: str, request: DatasetRequest, hub: Hub, reporter: Reporter, what: str
) -> LockedAsset:
    """Pins the commit and finds the files of the requested config and splits.

    Args:
        name: the asset's name.
        what: the asset's name in messages.

    Raises:
        UsageError: the repository, revision, config or split does not exist; no file has a known
            format; shards are missing.
        PolicyError: a path is not allowed in a bundle; only the dataset's own code can generate it.
    """
    repository = hub.repository(what, "dataset", request.repository, request.revision)
    listing = hub.files(what, repository)
    if request.include or request.exclude:
        return _as_published(name, request, repository, listing, what)
    chosen = _choose(request, repository, listing, hub, what)
    if chosen.parquet_commit:
        reporter.note(
            f"{name}: taken from {CONVERSION_BRANCH}: "
            f"config `{chosen.config}` is not published as parquet"
        )
    splits = _pick_splits(request, chosen, repository.id, what)
    if chosen.originals:
        count = human_count(sum(map(len, splits.values())), f"{chosen.originals.convert} file")
        reporter.note(
            f"{name}: config `{chosen.config}` is neither published as parquet nor converted by "
            f"the Hub: it is converted here from its {count}"
        )
    chosen = _with_separator(chosen, request.separator, what)
    asset = _asset(name, request, repository, chosen.parquet_commit)
    return _with_files(asset, chosen, splits, repository, listing, what)


def _asset(
    name: str, request: DatasetRequest, repository: Repository, parquet_commit: str | None = None
) -> LockedAsset:
    """The asset without its files."""
    return LockedAsset(
        name=name,
        kind="dataset",
        request=as_lock_request(request),
        source=Source("hub", repository.id, request.revision, repository.commit, parquet_commit),
        files=(),
        aliases=() if repository.id == request.repository else (request.repository,),
        licence=repository.licence,
    )


def _as_published(
    name: str,
    request: DatasetRequest,
    repository: Repository,
    listing: Mapping[str, RemoteFile],
    what: str,
) -> LockedAsset:
    """The files that the patterns take, under their own paths, with the card."""
    asset = _asset(name, request, repository)
    taken, left_out = select_by_patterns(
        list(listing.values()),
        request.include,
        request.exclude,
        what,
        allow_code=request.allow_code,
    )
    if not taken:
        raise UsageError(
            f"{what}: no file of {repository.id} is left to take.", "Check `include` and `exclude`."
        )
    files = tuple(locked_file(file, f"{asset.folder}/{file.path}") for file in taken)
    for file in files:
        check_path(file.path, what, way_without(asset.request))
    code = tuple(file.path for file in files if file.path.endswith(".py"))
    return replace(
        asset,
        files=files,
        left_out=tuple(left_out),
        code=(Code(repository.id, repository.commit, repository.licence, code),) if code else (),
    )


def _with_separator(chosen: _Chosen, separator: str | None, what: str) -> _Chosen:
    """The config with the manifest's separator for its CSV files.

    Raises:
        UsageError: its files are not CSV.
    """
    if separator is None:
        return chosen
    if chosen.originals is None or chosen.originals.convert != "csv":
        raise UsageError(
            f"{what}: `separator`: config `{chosen.config}` is not made from CSV files.",
            "Remove that line.",
        )
    return replace(chosen, originals=replace(chosen.originals, separator=separator))


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
            raise PolicyError(
                f"{what}: {printable(split)} cannot name a split: it names files in the bundle.",
                "Get the dataset with `hf download`, rename the split, and use `path:`.",
            )
        parquet_layout.check_shards_are_whole(paths, what)
        shards = [
            f"{asset.folder}/{chosen.config}/{split}-{i:05d}-of-{len(paths):05d}.parquet"
            for i in range(len(paths))
        ]
        if chosen.originals:
            part = Part(split, chosen.originals.convert, chosen.originals.separator)
            made_from += [replace(ingredient_of(chosen.files[path]), part=part) for path in paths]
            locked[split] = LockedSplit((), declared_rows=declared.get(split))
        else:
            files += [
                locked_file(chosen.files[path], shard)
                for path, shard in zip(paths, shards, strict=True)
            ]
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
    """The licence files and the like, without the README.

    Names that a bundle does not allow are skipped: a dataset entry has no `exclude` for them.
    """
    found = sorted(
        path for path in paths if is_document(path) and not path.lower().startswith("readme")
    )
    return list({folded(path): path for path in found if problem_with_path(path) is None}.values())


def _choose(
    request: DatasetRequest,
    repository: Repository,
    listing: Mapping[str, RemoteFile],
    hub: Hub,
    what: str,
) -> _Chosen:
    """The requested config in the best available form."""
    configs = repository.card.get("configs")
    paths = list(listing)
    declared = bool(parquet_layout.entries(configs))
    published = parquet_layout.published(configs, paths)
    script = loading_script(repository.id, paths)
    own = {} if script or (published and not declared) else originals(configs, paths)
    names = {**own, **published}
    config = request.config or parquet_layout.default_config(configs, names)
    if config in published:
        return _Chosen(config, published[config], listing)
    if config is None and names:
        raise _name_a_config(repository.id, names, what)
    # A config found by names alone is `default`; the Hub's conversion may use another name.
    converted, partial = _converted(config if declared else request.config, repository, hub, what)
    if isinstance(converted, _Chosen):
        return converted
    if script and not converted:
        raise PolicyError(
            f"{what}: the dataset {repository.id} is generated by its own code ({script}), and "
            "has no parquet. Airlift runs no code of a dataset; "
            "nor does `datasets` since version 4.",
            "Ask its owner for parquet (on the Hub: its discussions), "
            "or generate it yourself and name it with `path:`.",
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
        + f", neither published nor converted by the Hub ({CONVERSION_BRANCH})"
        + (
            f", and cannot be converted here: {problem}."
            if problem
            else ", nor files that could be converted."
        ),
        "Check `config`; or download the files (hf download) and name them with `path:`.",
    )


def _converted(
    config: str | None, repository: Repository, hub: Hub, what: str
) -> tuple[_Chosen | tuple[str, ...], UsageError | None]:
    """The config as the Hub converted it; else the names of the configs that it converted.

    The second value is the error of a config that is converted only in part.
    """
    conversion = find_conversion(hub, repository, what)
    if conversion is None:
        return (), None
    paths = list(conversion.files)
    try:
        layout = parquet_layout.from_conversion(paths, what, config)
    except UsageError as error:
        return tuple(parquet_layout.from_conversion(paths, what, "")), error
    config = config or parquet_layout.default_config(repository.card.get("configs"), layout)
    if config is None and layout:
        raise _name_a_config(repository.id, layout, what)
    if config is None or config not in layout:
        return tuple(layout), None
    return _Chosen(config, layout[config], conversion.files, conversion.commit), None


def _name_a_config(
    id: str, layout: Mapping[str, object], what: str, asked: str | None = None
) -> UsageError:
    problem = f"has no config `{asked}`" if asked else "has several configs"
    shown = ", ".join(list(layout)[:20]) + (", ..." if len(layout) > 20 else "")
    return UsageError(
        f"{what}: the dataset {id} {problem}.",
        suggest(asked or "", layout, f"Write `config:` and one of: {shown}."),
    )


def _pick_splits(
    request: DatasetRequest, chosen: _Chosen, id: str, what: str
) -> dict[str, list[str]]:
    for split in request.splits:
        if split not in chosen.splits:
            raise UsageError(
                f"{what}: config `{chosen.config}` of {id} has no split `{split}`.",
                suggest(split, chosen.splits, f"It has: {', '.join(chosen.splits)}."),
            )
    return {
        split: paths
        for split, paths in chosen.splits.items()
        if not request.splits or split in request.splits
    }


def _left_out(file: RemoteFile, chosen: _Chosen) -> LeftOut:
    if any(file.path in paths for paths in chosen.splits.values()):
        return LeftOut(file.path, file.size, "another split")
    if chosen.originals:
        return LeftOut(file.path, file.size, "not part of this config")
    return LeftOut(
        file.path, file.size, "another config" if file.path.endswith(".parquet") else "not parquet"
    )
