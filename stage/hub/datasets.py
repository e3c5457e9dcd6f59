"""Resolves a dataset request: the files that it names, as published, or one config by splits.

For a config, published parquet comes first; else the Hub's own conversion on
`refs/convert/parquet`; else the published files (CSV, JSON, text, Arrow, images), which
`stage.staging.sources.source` converts to parquet.
Rows and schema are known only after the download: `fetch` reads them and completes the lock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from stage.errors import PolicyError, UsageError, suggest
from stage.files import human_count
from stage.hub import layout
from stage.hub.client import Hub, Repository
from stage.hub.layout import CONVERSION_BRANCH, Config
from stage.hub.model_files import (
    RemoteFile,
    ingredient_of,
    is_document,
    locked_file,
    select_by_patterns,
)
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
from stage.paths import check_path, is_split_name, printable, problem_with_path
from stage.progress import Reporter


def resolve_dataset(
    name: str, request: DatasetRequest, hub: Hub, reporter: Reporter
) -> LockedAsset:
    """Pins the commit and finds the files of the requested config and splits.

    Args:
        name: the asset's name.

    Raises:
        UsageError: the repository, revision, config or split does not exist; no file has a known
            format; shards are missing.
        PolicyError: a path is not allowed in a bundle; only the dataset's own code can generate it.
    """
    repository = hub.repository("dataset", request.repository, request.revision)
    listing = hub.files(repository)
    asset = LockedAsset(
        name=name,
        kind="dataset",
        request=as_lock_request(request),
        source=Source(request.source_type, repository.id, request.revision, repository.commit),
        files=(),
        aliases=() if repository.id == request.repository else (request.repository,),
        licence=repository.licence,
    )
    if request.include or request.exclude:
        return _as_published(asset, request, repository, listing)
    config, chosen = _choose(request, repository, listing, hub)
    for split in request.splits:
        if split not in chosen.splits:
            raise UsageError(
                f"config `{config}` of {repository.id} has no split `{split}`.",
                suggest(split, chosen.splits, f"It has: {', '.join(chosen.splits)}."),
            )
    if request.separator and chosen.convert != "csv":
        raise UsageError(
            f"`separator`: config `{config}` is not made from CSV files.",
            "Remove that line.",
        )
    splits = {s: chosen.splits[s] for s in chosen.splits if s in (request.splits or chosen.splits)}
    if chosen.parquet_commit:
        reporter.note(
            f"{name}: taken from {CONVERSION_BRANCH}: config `{config}` is not published as parquet"
        )
    elif chosen.convert:
        count = human_count(sum(map(len, splits.values())), f"{chosen.convert} file")
        reporter.note(
            f"{name}: config `{config}` is neither published as parquet nor converted by "
            f"the Hub: it is converted here from its {count}"
        )
    source = replace(asset.source, parquet_commit=chosen.parquet_commit)
    chosen = replace(chosen, separator=request.separator or chosen.separator)
    return _with_files(replace(asset, source=source), config, chosen, splits, repository, listing)


def find_configs(
    hub: Hub, dataset: Repository, listing: Mapping[str, RemoteFile]
) -> dict[str, Config]:
    """Config -> the best form in which it can be had: as parquet, published or converted by the
    Hub, or converted here; or the problem.

    Raises:
        IncompleteError: the Hub cannot be reached.
    """
    own, by_hub = _published(dataset, listing), {}
    try:
        conversion = hub.repository("dataset", dataset.id, CONVERSION_BRANCH)
    except UsageError:
        pass
    else:
        files = hub.files(conversion)
        by_hub = {
            name: replace(config, files=files, parquet_commit=conversion.commit)
            for name, config in layout.converted(files).items()
        }
    declared = layout.entries(dataset.card.get("configs"))
    if not declared and any(config.problem is None for config in by_hub.values()):
        # A config found by names alone is `default`; the Hub's conversion may use another name.
        own = {name: config for name, config in own.items() if config.is_published_parquet}
    forms = sorted([*own.items(), *by_hub.items()], key=lambda form: _rank(form[1]))
    return dict(forms)


def _rank(config: Config) -> int:
    if config.problem:
        return 0
    return 3 if config.is_published_parquet else 2 if config.parquet_commit else 1


def _published(dataset: Repository, listing: Mapping[str, RemoteFile]) -> dict[str, Config]:
    """The configs as the repository has them; of one that its own code generates, parquet only."""
    found = layout.published(dataset.card.get("configs"), list(listing))
    return {
        name: replace(config, files=listing)
        for name, config in found.items()
        if config.is_published_parquet or _script(dataset) not in listing
    }


def _script(dataset: Repository) -> str:
    """The name of the Python file that generates a dataset, if there is one."""
    return f"{dataset.id.rpartition('/')[2]}.py"


def _choose(
    request: DatasetRequest,
    repository: Repository,
    listing: Mapping[str, RemoteFile],
    hub: Hub,
) -> tuple[str, Config]:
    """The requested config, by name, in its best form."""
    card = repository.card.get("configs")
    found = _published(repository, listing)
    name = request.config or layout.default_config(card, found)
    if name not in found or not found[name].is_published_parquet:
        found = find_configs(hub, repository, listing)
        name = request.config or layout.default_config(card, found)
    id = repository.id
    if name in found and found[name].problem is None:
        return name, found[name]
    if name in found:
        raise UsageError(
            f"config `{name}` of the dataset {id} has no parquet, neither published nor "
            f"converted by the Hub ({CONVERSION_BRANCH}), and cannot be converted here: "
            f"{found[name].problem}.",
            "Check `config`; or download the files (hf download) and name them with `path:`.",
        )
    if usable := [name for name, config in found.items() if config.problem is None]:
        problem = f"has no config `{name}`" if name else "has several configs"
        usable = [n for n in usable if all(map(is_split_name, found[n].splits))] or usable
        shown = ", ".join(usable[:20]) + (", ..." if len(usable) > 20 else "")
        raise UsageError(
            f"the dataset {id} {problem}.",
            suggest(name or "", usable, f"Write `config:` and one of: {shown}."),
        )
    if _script(repository) in listing:
        raise PolicyError(
            f"the dataset {id} is generated by its own code ({_script(repository)}), and "
            "has no parquet. Airlift runs no code of a dataset; "
            "nor does `datasets` since version 4.",
            "Ask its owner for parquet (on the Hub: its discussions), "
            "or generate it yourself and name it with `path:`.",
        )
    raise UsageError(
        f"the dataset {id} has no parquet, neither published nor converted by the Hub "
        f"({CONVERSION_BRANCH}), nor files that could be converted.",
        "Download its files (hf download) and name them with `path:`.",
    )


def _as_published(
    asset: LockedAsset,
    request: DatasetRequest,
    repository: Repository,
    listing: Mapping[str, RemoteFile],
) -> LockedAsset:
    """The files that the patterns take, under their own paths, with the card."""
    taken, left_out = select_by_patterns(
        list(listing.values()),
        request.include,
        request.exclude,
        allow_code=request.allow_code,
    )
    if not taken:
        raise UsageError(
            f"no file of {repository.id} is left to take.", "Check `include` and `exclude`."
        )
    files = tuple(locked_file(file, f"{asset.folder}/{file.path}") for file in taken)
    for file in files:
        check_path(file.path, way_without(asset.request))
    code = tuple(file.path for file in files if file.path.endswith(".py"))
    return replace(
        asset,
        files=files,
        left_out=tuple(left_out),
        code=(Code(repository.id, repository.commit, repository.licence, code),) if code else (),
    )


def _with_files(
    asset: LockedAsset,
    config: str,
    chosen: Config,
    splits: Mapping[str, list[str]],
    repository: Repository,
    listing: Mapping[str, RemoteFile],
) -> LockedAsset:
    declared = layout.declared_rows(repository.card.get("dataset_info"), config)
    locked: dict[str, LockedSplit] = {}
    files: list[LockedFile] = []
    made_from: list[Ingredient] = []
    for split, paths in splits.items():
        if not is_split_name(split):
            raise PolicyError(
                f"{printable(split)} cannot name a split: it names files in the bundle.",
                "Get the dataset with `hf download`, rename the split, and use `path:`.",
            )
        layout.check_shards_are_whole(paths)
        shards = [
            f"{asset.folder}/{config}/{split}-{i:05d}-of-{len(paths):05d}.parquet"
            for i in range(len(paths))
        ]
        check_path(shards[0], way_without(asset.request))
        sources = [chosen.files[path] for path in paths]
        if chosen.convert:
            part = Part(split, chosen.convert, chosen.separator)
            made_from += [replace(ingredient_of(file), part=part) for file in sources]
        else:
            files += map(locked_file, sources, shards)
        here = () if chosen.convert else tuple(shards)
        locked[split] = LockedSplit(here, declared_rows=declared.get(split))
    # A name that a bundle does not allow is left out: the entry of a config has no `exclude`.
    documents = [p for p in listing if is_document(p) and problem_with_path(p) is None]
    for path in sorted(documents):
        if path == "README.md" or not path.lower().startswith("readme"):
            target = CARD if path == "README.md" else path
            files.append(locked_file(listing[path], f"{asset.folder}/{target}"))
    taken = {file.origin for file in files} | {ingredient.origin for ingredient in made_from}
    rest = [file for file in {**listing, **chosen.files}.values() if file.path not in taken]
    return replace(
        asset,
        files=tuple(files),
        made_from=tuple(made_from),
        configs={config: locked},
        left_out=tuple(
            LeftOut(file.path, file.size, _why_left(file.path, chosen)) for file in rest
        ),
    )


def _why_left(path: str, chosen: Config) -> str:
    if any(path in paths for paths in chosen.splits.values()):
        return "another split"
    if chosen.convert:
        return "not part of this config"
    return "another config" if path.endswith(".parquet") else "not parquet"
