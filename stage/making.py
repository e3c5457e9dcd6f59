"""What does not travel as it was published: downloads the ingredients, makes the files, puts them into the bundle.

ingredients (an archive, CSV files, pickles) -> workshop, a folder beside the payload -> unpack, convert -> payload.
A lock that was complete already says what must come out; a fresh one learns it here. The workshop is emptied when the
asset is in place, so a file damaged later is made anew from ingredients fetched anew.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from stage.convert import CONFIG, convert
from stage.digest import FileDigests, hash_file
from stage.errors import DamageError, PolicyError
from stage.lockfile import Ingredient, LockedAsset, LockedFile, LockedSplit
from stage.manifest import Manifest, PathRequest, UrlRequest
from stage.names import check_path
from stage.progress import Reporter
from stage.sources import Sources
from stage.sources.environment.assets import make_environment
from stage.sources.parquet_layout import splits_of_names
from stage.sources.web import file_name
from stage.unpack import unpack
from stage.workfolder import WORKSHOP, WorkFolder

Progress = Callable[[int], None]
Digests = dict[str, FileDigests]


def check_may_make(asset: LockedAsset, manifest: Manifest, sources: Sources) -> None:
    """Refuses, before anything is downloaded, what needs a person's leave.

    Raises:
        PolicyError: the ingredients are pickles, and this run was not told `--allow-pickle`.
    """
    if asset.source.type == "hub" and not sources.allow_pickle:
        raise PolicyError(
            f"{manifest.place(asset.name)}: `{asset.name}`: its weights are made of pickles "
            f"({asset.made_from[0].origin}), which have to be fetched again.",
            "Run with --allow-pickle: they are read with torch.load(weights_only=True) and travel as safetensors.",
        )


def make(
    asset: LockedAsset,
    root: Path,
    folder: WorkFolder,
    manifest: Manifest,
    sources: Sources,
    reporter: Reporter,
    pin: Callable[[LockedAsset], None],
    progress: Progress,
) -> tuple[LockedAsset, Digests]:
    """Makes the files of an asset that do not travel as published, and puts them in place.

    Args:
        pin: called with the asset as soon as its ingredients' digests are known.

    Returns:
        The asset with all its files; the digests of those made.

    Raises:
        StageError: what the sources, `unpack`, `convert` and `weights` refuse.
        DamageError: something else came out than the lock says.
    """
    bench = root / WORKSHOP / asset.name
    out = bench / "made"
    if out.exists():
        shutil.rmtree(out)
    if asset.environment is not None:
        out.mkdir(parents=True)
        made, files = make_environment(asset, root / asset.folder, out, reporter)
    else:
        inputs, ingredients = _gather(asset, bench, manifest, sources, progress)
        pinned = replace(asset, made_from=ingredients)
        if pinned != asset:
            pin(pinned)
        reporter.detail(f"{asset.name}: made from {len(inputs)} fetched or local files")
        made, files = _files(pinned, manifest, inputs, out)
    digests = {file.path: hash_file(path) for file, path in files}
    complete = replace(
        made,
        files=tuple(f for f in asset.files if not f.made_by)
        + tuple(replace(f, size=digests[f.path].size, sha256=digests[f.path].sha256) for f, _ in files),
    )
    _check_as_locked(asset, complete, manifest)
    folder.mark_unfinished({file.path for file, _ in files})
    for file, path in files:
        _put(path, root / file.path)
    shutil.rmtree(bench, ignore_errors=True)
    return complete, digests


def _gather(
    asset: LockedAsset, bench: Path, manifest: Manifest, sources: Sources, progress: Progress
) -> tuple[dict[str, Path], tuple[Ingredient, ...]]:
    """Every ingredient: its path at the source -> where it lies here; and what is known of it now."""
    inputs: dict[str, Path] = {}
    known: list[Ingredient] = []
    for ingredient in asset.made_from:
        name = file_name(ingredient.origin, asset.name) if asset.source.type == "url" else ingredient.origin
        check_path(name, asset.name)
        target = bench / "originals" / name
        path, digests = sources.bring_ingredient(asset, ingredient, manifest, target, progress)
        inputs[name] = path
        known.append(replace(ingredient, size=digests.size, sha256=digests.sha256))
    return inputs, tuple(known)


def _files(
    asset: LockedAsset, manifest: Manifest, inputs: dict[str, Path], out: Path
) -> tuple[LockedAsset, list[tuple[LockedFile, Path]]]:
    """The files made, each with where it will lie; their digests come later."""
    request = manifest.requests[asset.name]
    what = f"{manifest.place(asset.name)}: `{asset.name}`"
    if not isinstance(request, UrlRequest | PathRequest):
        from stage.weights import convert_pickles

        made = convert_pickles(inputs, out, what)
        return asset, [
            (LockedFile(f"{asset.folder}/{name}", 0, None, None, origin, "safetensors"), out / name)
            for name, origin in made.items()
        ]
    if isinstance(request, UrlRequest) and request.unpack:
        archive = next(iter(inputs.values()))
        unpacked = out / "unpacked"
        inputs = {name: unpacked / name for name in unpack(archive, unpacked, what)}
    if request.convert:
        splits = convert(request.convert, inputs, splits_of_names, out / "parquet", what)
        folder = f"{asset.folder}/{CONFIG}"
        files = [
            (LockedFile(f"{folder}/{shard.name}", 0, None, None, split.origin, request.convert), shard)
            for split in splits.values()
            for shard in split.shards
        ]
        locked = {
            name: LockedSplit(tuple(f"{folder}/{shard.name}" for shard in split.shards))
            for name, split in splits.items()
        }
        return replace(asset, configs={CONFIG: locked}), files
    how = "unpack" if isinstance(request, UrlRequest) and request.unpack else "download"
    return asset, [
        (LockedFile(f"{asset.folder}/{name}", 0, None, None, name, how), path) for name, path in inputs.items()
    ]


def _check_as_locked(before: LockedAsset, after: LockedAsset, manifest: Manifest) -> None:
    """What was locked must come out again, byte for byte."""
    locked = {file.path: file.sha256 for file in before.files if file.made_by}
    if not locked:
        return
    came = {file.path: file.sha256 for file in after.files if file.made_by}
    different = sorted(path for path in {*locked, *came} if locked.get(path) != came.get(path))
    if different:
        raise DamageError(
            f"{before.name}: made anew, {different[0]} comes out different from what {manifest.lock_path.name} says "
            f"({len(different)} of {len(came)} files).",
            f"{_what_decides(before)}: use the versions the lock was made with, or accept new digests: "
            f"stage fetch {manifest.path} --update {before.name} -o ...",
        )


def _what_decides(asset: LockedAsset) -> str:
    if asset.environment is not None:
        return "An environment holds airlift itself, and built wheels depend on the tools that build them"
    return "Parquet and safetensors bytes depend on the version of pyarrow, torch and safetensors"


def _put(source: Path, target: Path) -> None:
    """Into the payload: on disk before it has its name."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(source, "rb") as file:
        os.fsync(file.fileno())
    source.replace(target)
