"""From the manifest to the lock: resolves each entry, or keeps what an earlier lock pinned.

A lock answers a manifest asset by asset. An entry that is still written the same way keeps its pin,
a new or changed entry is resolved again, and a removed one is dropped. So a new dataset never moves
the model.

What would be found only after hours of downloads is checked here: patterns that omit files which
a model needs to load, and adapters without the model that they were trained on. A bundle must not
be made inside another bundle, which would then have extra files, nor inside a folder that it takes
in, which would then change with each fetch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stage.bundle.bundle import LOCK, holds_bundle
from stage.bundle.inspect import TOKENIZER, WEIGHTS
from stage.convert.convert import made_with
from stage.errors import Mistakes, PolicyError, UsageError, about, quoted, suggest
from stage.files import human_count, human_size, join_limited, read_file
from stage.hub.model_files import PICKLE_SUFFIXES
from stage.lock.licences import check_licences, with_stated_licence
from stage.lock.manifest import Manifest
from stage.lock.model import (
    EXCLUDED,
    FOLDERS,
    NOT_INCLUDED,
    LockedAsset,
    Lockfile,
    read_lock,
)
from stage.lock.requests import (
    AssetRequest,
    DatasetRequest,
    EnvironmentRequest,
    MetricRequest,
    ModelRequest,
    PathRequest,
    UrlRequest,
    as_lock_request,
    way_without,
)
from stage.lock.yaml_lines import scalar
from stage.paths import check_collisions, printable
from stage.progress import Reporter
from stage.staging.new_manifest import asset_names
from stage.staging.sources.local import PathSource, local_base
from stage.staging.sources.repository import DatasetSource, MetricSource, ModelSource
from stage.staging.sources.source import ALL, AssetSource, FetchRun
from stage.staging.sources.url import UrlSource
from stage.walk import matches

_INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"-\d{5}-of-\d{5}")
_SHOWN = 3


@dataclass(frozen=True)
class Omitted:
    """Files of the repository that the patterns omit.

    Attributes:
        needed: files that the weights need to load.
        notes: descriptions of other files that a user may miss.
    """

    needed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def omitted_files(asset: LockedAsset) -> Omitted:
    """The files that `include` and `exclude` of a model omit, beside the weights that they take."""
    if asset.kind != "model" or not {"include", "exclude"} & asset.request.keys():
        return Omitted()
    taken = {file.path.removeprefix(f"{asset.folder}/") for file in asset.files}
    left = {left.path for left in asset.left_out if left.reason in (EXCLUDED, NOT_INCLUDED)}
    folders = {_folder(path) for path in taken if _is(WEIGHTS, path)}
    needed = needed_for_weights(taken, left)
    if "include" not in asset.request:  # a person who excludes them by name knows that
        return Omitted(tuple(needed))
    notes = []
    others = sorted(path for path in left if WEIGHTS.fullmatch(path))
    if others and not asset.made_from and not any(_is(WEIGHTS, path) for path in taken):
        notes.append(
            f"its weights ({join_limited(others, _SHOWN)}): "
            "without them it can only be trained from scratch"
        )
    is_pipeline = "model_index.json" in taken | left  # its tokenizers have folders of their own
    others = sorted(
        p for p in left if _is(TOKENIZER, p) and (is_pipeline or _folder(p) in {"", *folders})
    )
    if others and not any(_is(TOKENIZER, path) for path in taken):
        notes.append(f"its tokenizer ({join_limited(others, _SHOWN)})")
    return Omitted(tuple(needed), tuple(notes))


def needed_for_weights(taken: Collection[str], left: Collection[str]) -> list[str]:
    """Omitted files that weights need to load: the config, all shards and their index.

    Args:
        taken: paths in the repository.
        left: those that are omitted.
    """
    folders = sorted({_folder(path) for path in taken if _is(WEIGHTS, path)})
    return [path for folder in folders for path in _needed(folder, taken, left)]


def _needed(folder: str, taken: Collection[str], left: Collection[str]) -> list[str]:
    weights = [path for path in taken if _folder(path) == folder and _is(WEIGHTS, path)]
    others = [path for path in left if _folder(path) == folder and _is(WEIGHTS, path)]
    wanted = [folder + "config.json"]
    if any(_SHARD.search(path) for path in weights):
        wanted += [folder + _INDEX, *sorted(path for path in others if "-of-" in path)]
    return [path for path in wanted if path in left]


def _folder(path: str) -> str:
    """With a `/` at its end; of a file at the top: nothing."""
    return path[: path.rfind("/") + 1]


def _is(pattern: re.Pattern[str], path: str) -> bool:
    return pattern.fullmatch(path.rpartition("/")[2]) is not None


def check_complete_for_loading(manifest: Manifest, assets: Mapping[str, LockedAsset]) -> None:
    """Checks that patterns omit no file that weights need to load.

    Raises:
        UsageError: they do; names the files.
    """
    omitted = {name: omitted_files(asset).needed for name, asset in assets.items()}
    omitted = {name: needed for name, needed in omitted.items() if needed}
    if not omitted:
        return
    mistakes = "; ".join(
        f"{manifest.place(name)}: `{name}`: its weights will not load without "
        f"{', '.join(needed[:4])}{', ...' if len(needed) > 4 else ''}, which its patterns leave out"
        for name, needed in omitted.items()
    )
    files = ", ".join(f'"{file}"' for file in next(iter(omitted.values()))[:4])
    raise UsageError(
        f"{mistakes}.",
        f"Add to `include` (or remove from `exclude`): {files}. "
        "To fetch it as it is: --no-offline-check",
    )


def check_bases(manifest: Manifest, assets: Mapping[str, LockedAsset]) -> None:
    """Checks that the manifest asks for the base model of each adapter, at any revision.

    Raises:
        UsageError: it does not; with the lines to add.
    """
    here = {name for asset in assets.values() if asset.kind == "model" for name in asset.names}
    alone = {
        name: asset.base
        for name, asset in assets.items()
        if asset.base is not None and asset.base.repository not in here
    }
    if not alone:
        return
    bases = {base.repository: base for base in alone.values()}
    lines = []
    for name, base in zip(asset_names(bases, taken=assets), bases.values(), strict=True):
        lines += [f"  {scalar(name)}:", f"    model: {scalar(base.repository)}"]
        if base.revision != "main":
            lines.append(f"    revision: {scalar(base.revision)}")
    adapters = "; ".join(
        f"{manifest.place(name)}: `{name}` is an adapter of {base.repository}"
        for name, base in alone.items()
    )
    entry = "its entry" if len(alone) == 1 else "their entries"
    names = "this name" if len(bases) == 1 else "these names"
    raise UsageError(
        f"{adapters}, and the manifest has no entry for {names}.",
        "\n     ".join(
            [
                "Add to `assets:` (a model that is there under another name: write it as here):",
                *lines,
                f"Or leave it out, with `base: false` in {entry}.",
            ]
        ),
    )


def check_nesting(root: Path, manifest: Manifest) -> None:
    """Looks at where a bundle is going to be.

    Args:
        root: the bundle's folder, which need not exist.

    Raises:
        UsageError: it is inside a bundle, or inside a folder that a `path:` entry takes.
    """
    here = root.resolve()
    for outer in here.parents:
        if holds_bundle(outer):
            raise UsageError(
                f"{root}: lies inside the bundle {outer}, which would then have extra files.",
                f"Give another folder with -o, for instance {outer.parent / manifest.name}.",
            )
    for name, request in manifest.requests.items():
        if not isinstance(request, PathRequest) or request.path.startswith("~"):
            continue
        try:
            base = local_base(request.path, manifest).resolve()
        except (ValueError, RuntimeError):  # no path, or a loop of links: reported by `list_path`
            continue
        if base.is_file() or (base != here and base not in here.parents):
            continue  # a bundle inside a file is reported by `WorkFolder`
        inside = here.relative_to(base).as_posix()
        if not any(matches(f"{inside}/{LOCK}", pattern) for pattern in request.exclude):
            # Of the whole folder nothing would be left.
            omit = f', or exclude it: exclude: ["{inside}/**"]' if here != base else "."
            raise UsageError(
                f"{manifest.place(name, 'path')}: `{name}`: the bundle {root} would be "
                f"inside {request.path}, and {request.path} is copied into the bundle: "
                "each fetch would add the last one.",
                "Choose a folder outside of it: -o "
                f"{quoted(base.with_name(f'{base.name}-bundle'))}{omit}",
            )


def _environment(name: str, request: EnvironmentRequest, run: FetchRun) -> AssetSource[Any]:
    # Solvers and image take 0.15 s to import, and most manifests have no environment.
    from stage.staging.sources.environment import EnvironmentSource

    return EnvironmentSource(name, request, run)


SOURCES: Mapping[type[AssetRequest], Callable[[str, Any, FetchRun], AssetSource[Any]]] = {
    ModelRequest: ModelSource,
    DatasetRequest: DatasetSource,
    MetricRequest: MetricSource,
    PathRequest: PathSource,
    UrlRequest: UrlSource,
    EnvironmentRequest: _environment,
}
"""Each kind of entry in a manifest, and the source that answers it: a file in `sources`."""


def open_sources(run: FetchRun) -> dict[str, AssetSource[Any]]:
    """The source of each asset of the manifest, by its name."""
    requests = run.manifest.requests
    return {name: SOURCES[type(request)](name, request, run) for name, request in requests.items()}


def read_previous(manifest: Manifest) -> Lockfile | None:
    """The lock beside a manifest, if there is one.

    Raises:
        UsageError: the file exists and cannot be read.
    """
    path = manifest.lock_path
    try:
        return read_lock(read_file(path), str(path))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UsageError(
            f"{path}: cannot be read: {error.strerror}.", "Move it away, or make it readable."
        ) from None


def unanswered(manifest: Manifest, lock: Lockfile | None, update: Collection[str]) -> set[str]:
    """Names of assets to resolve: those that a lock does not answer, and those to update."""
    have = lock.assets if lock else {}
    return {
        name
        for name, request in manifest.requests.items()
        if name not in have
        or name in update
        or ALL in update
        or dict(have[name].request) != as_lock_request(request)
    }


def look_at_local(
    run: FetchRun, previous: Lockfile | None, sources: Mapping[str, AssetSource[Any]]
) -> dict[str, int]:
    """Looks at the files of this machine, before anything is hashed or requested.

    Returns:
        Payload path -> bytes of files that will be copied.

    Raises:
        StageError: files are missing or must not travel; all such mistakes in one error.
    """
    required = unanswered(run.manifest, previous, run.options.update)
    sizes: dict[str, int] = {}
    mistakes = Mistakes()
    for name, source in sources.items():
        sizes |= source.look(mistakes, required=name in required)
    mistakes.check(str(run.manifest.path))
    return sizes


def resolve(
    run: FetchRun, previous: Lockfile | None, sources: Mapping[str, AssetSource[Any]]
) -> Lockfile:
    """Makes the lock that answers a manifest.

    Args:
        previous: pins to keep where they still answer.

    Raises:
        UsageError: `--locked` and the lock does not answer; an unknown asset to update; a source
            refuses.
        PolicyError: a licence that the manifest's policy does not allow; a source refuses.
    """
    manifest, reporter = run.manifest, run.reporter
    _check_updates(run)
    to_resolve = unanswered(manifest, previous, run.options.update)
    if run.options.locked:
        _check_answered(manifest, previous, to_resolve)
    assets: dict[str, LockedAsset] = {}
    mistakes = Mistakes()
    for name, source in sources.items():
        if previous and name not in to_resolve:
            assets[name] = previous.assets[name]
            source.check_unchanged(assets[name])
            reporter.detail(f"{name}: pinned by {manifest.lock_path.name}")
            continue
        assets[name] = with_stated_licence(source.resolve(), source.request, manifest)
        _print_asset(assets[name], reporter)
        for missing in omitted_files(assets[name]).notes:
            reporter.note(f"note: {source.what}: `include` leaves out {missing}")
    check_bases(manifest, assets)
    for name, source in sources.items():
        with mistakes:
            source.check_can_be_fetched(assets[name])
    mistakes.check(str(manifest.path))
    _check_one_commit_per_revision(manifest, assets)
    lock = Lockfile(manifest.name, assets)
    if previous is not None:
        lock = _keep_known_digests(lock, previous)
    check_names(lock, manifest)
    check_licences(manifest, lock)
    _check_allowed(manifest, lock)
    return lock


def _check_one_commit_per_revision(manifest: Manifest, assets: Mapping[str, LockedAsset]) -> None:
    """Checks that a branch or tag of a repository means one commit: a script could get but one.

    Raises:
        UsageError: names the two assets.
    """
    first: dict[tuple[str, str, str | None], LockedAsset] = {}
    for asset in assets.values():
        source = asset.source
        other = first.setdefault(
            (FOLDERS[asset.kind], source.location, source.requested_revision), asset
        )
        if source.is_repository and other.source.commit != source.commit:
            raise UsageError(
                f"{manifest.place(asset.name)}: `{other.name}` and `{asset.name}` are "
                f"{source.location} at `{source.requested_revision}`, and "
                f"{manifest.lock_path.name} has two commits of it.",
                manifest.update_command(other.name) + f" --update {asset.name}",
            )


def _check_answered(
    manifest: Manifest, previous: Lockfile | None, unanswered: Collection[str]
) -> None:
    """Refuses what `--locked` does not allow.

    Raises:
        UsageError: the lock does not answer the manifest; names the assets.
    """
    dropped = {*previous.assets} - {*manifest.requests} if previous else ()
    if previous is not None and not unanswered and not dropped:
        return
    names = ", ".join(sorted({*unanswered, *dropped}))
    problem = "is not there" if previous is None else f"does not answer it: {names}"
    raise UsageError(
        f"{manifest.path}: --locked, but {manifest.lock_path.name} {problem}.",
        f"stage lock {quoted(manifest.path)}",
    )


def check_names(lock: Lockfile, manifest: Manifest) -> None:
    """Checks that no two files would be one file on some disk, asset by asset.

    Raises:
        PolicyError: naming two of them.
    """
    for asset in lock.assets.values():
        with about(manifest.entry(asset.name)):
            check_collisions([file.path for file in asset.files], way_without(asset.request))
    with about(str(manifest.path)):
        check_collisions([asset.folder for asset in lock.assets.values()])


def _print_asset(asset: LockedAsset, reporter: Reporter) -> None:
    reporter.note(asset_line(asset))
    for code in asset.code:
        names = ", ".join(path.removeprefix(f"{asset.folder}/") for path in code.files)
        reporter.note(
            f"{asset.name}: with code, as the manifest allows: {names} of "
            f"{code.repository}@{code.commit[:12]}"
        )
    for left in asset.left_out:
        reporter.detail(f"  left out {left.path} ({human_size(left.size)}): {left.reason}")


def asset_line(asset: LockedAsset) -> str:
    """One line about a resolved asset."""
    source = asset.source
    where = f"{source.location}@{source.commit[:12]}" if source.commit else source.location
    revision = (
        f" ({source.requested_revision})"
        if source.requested_revision not in (None, source.commit)
        else ""
    )
    left = f", {len(asset.left_out)} left out" if asset.left_out else ""
    files = f"{human_count(len(asset.files), 'file')}, {human_size(asset.size)}"
    if asset.made_from and not any(file.made_by for file in asset.files):
        size = human_size(sum(i.size or 0 for i in asset.made_from))
        made = f"to be made from {human_count(len(asset.made_from), 'file')}, {size}"
        files = f"{files}, and more {made}" if asset.files else made
    return f"{asset.name}: {asset.kind} {where}{revision}: {files}{left}"


def _check_updates(run: FetchRun) -> None:
    options, manifest = run.options, run.manifest
    if options.locked and options.update:
        raise UsageError("--locked and --update contradict each other.", "Leave one of them out.")
    for name in {*options.update} - {ALL, *manifest.requests}:
        raise UsageError(
            f"--update {name}: {manifest.path} has no such asset.",
            suggest(name, manifest.requests, f"It has: {', '.join(manifest.requests)}."),
        )


def _keep_known_digests(lock: Lockfile, previous: Lockfile) -> Lockfile:
    """An asset that is resolved again to the same files keeps its completed entry.

    Not where its files were made with other versions than those here: they are made anew.
    """
    for name, asset in lock.assets.items():
        old = previous.assets.get(name)
        if old is None or not asset.source.is_repository or _pins(asset) != _pins(old):
            continue
        if not old.made_with or old.made_with == made_with():
            lock = lock.with_asset(old)
    return lock


def _pins(asset: LockedAsset) -> LockedAsset:
    """What decides all files of an asset of a Hub: the same commit, chosen from in the same way."""
    request = dict(asset.request)
    return replace(asset, request=request, files=(), made_from=(), made_with={}, configs={})


def _check_allowed(manifest: Manifest, lock: Lockfile) -> None:
    """Checks that a lock brings no pickle, and no code that the manifest does not allow."""
    for asset in lock.assets.values():
        if asset.kind not in ("model", "tokenizer", "metric"):
            continue
        for file in asset.files:
            name = file.path.lower()
            if name.endswith(PICKLE_SUFFIXES) or (
                name.endswith(".py") and not asset.request.get("allow_code")
            ):
                raise PolicyError(
                    f"{manifest.place(asset.name)}: `{asset.name}`: "
                    f"{manifest.lock_path.name} lists {printable(file.path)}, "
                    "which this manifest does not allow.",
                    f"Resolve it again: stage lock {quoted(manifest.path)} --update {asset.name}",
                )
