"""What does not travel as it was published: downloads the ingredients, makes the files, puts them into the bundle.

ingredients (an archive, CSV files, pickles) -> workshop, a folder beside the payload -> unpack, convert -> payload.
A lock that was complete already says what must come out; a fresh one learns it here. The workshop is emptied when the
asset is in place, so a file damaged later is made anew from ingredients fetched anew.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from stage.asset import CARD, Ingredient, LockedAsset, LockedFile, LockedSplit
from stage.convert import CONFIG, Split, convert, convert_splits
from stage.digest import FileDigests, hash_file, sha256_of_bytes
from stage.disk import human_count, human_size
from stage.errors import DamageError, PolicyError, UsageError
from stage.frontmatter import split_card
from stage.inspect import parquet_footer
from stage.manifest import Manifest
from stage.names import check_path
from stage.progress import Reporter
from stage.request import PathRequest, UrlRequest, way_without
from stage.sources import Sources
from stage.sources.code import made_local
from stage.sources.parquet_layout import info_of, natural, splits_of_names
from stage.sources.together import together
from stage.sources.web import file_name
from stage.unpack import unpack
from stage.workfolder import WORKSHOP, WorkFolder
from stage.yamlfile import MAX_SIZE

_SHOWN_COLUMNS = 8

Progress = Callable[[int], None]
Digests = dict[str, FileDigests]


def check_may_make(asset: LockedAsset, manifest: Manifest, sources: Sources) -> None:
    """Refuses, before anything is downloaded, what needs a person's leave.

    Raises:
        PolicyError: the ingredients are pickles, and this run was not told `--allow-pickle`.
    """
    pickles = [i.origin for i in asset.made_from if _is_pickle(asset, i.origin)]
    if pickles and not sources.allow_pickle:
        raise PolicyError(
            f"{manifest.place(asset.name)}: `{asset.name}`: its weights are made of pickles "
            f"({pickles[0]}), which have to be fetched again.",
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
        from stage.sources.environment.assets import make_environment  # a quarter of what starting would cost

        out.mkdir(parents=True)
        with reporter.at_work(f"make {asset.name}"):
            made, files = make_environment(asset, root / asset.folder, out, reporter)
    else:
        with reporter.bytes_bar(f"fetch {asset.name}", sum(i.size or 0 for i in asset.made_from)) as progress:
            inputs, ingredients = _gather(asset, bench, manifest, sources, progress)
        pinned = replace(asset, made_from=ingredients)
        if pinned != asset:
            pin(pinned)
        reporter.detail(f"{asset.name}: made from {len(inputs)} fetched or local files")
        with reporter.at_work(f"make {asset.name}"):
            made, files = _files(pinned, manifest, inputs, out, root, reporter)
        _tell_rows(made, files, manifest, reporter)
    with reporter.bytes_bar(f"hash {asset.name}", sum(path.stat().st_size for _, path in files)) as hashed:
        digests = {file.path: hash_file(path, progress=hashed) for file, path in files}
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
    wanted = {ingredient.origin: ingredient for ingredient in asset.made_from}  # a file may be in two splits

    def bring(ingredient: Ingredient) -> tuple[Path, FileDigests]:
        target = bench / "originals" / _workshop_name(asset, ingredient)
        return sources.bring_ingredient(asset, ingredient, manifest, target, progress)

    brought = dict(zip(wanted, together(bring, wanted.values(), sources.at_once, sources.stop), strict=True))
    known = [replace(i, size=brought[i.origin][1].size, sha256=brought[i.origin][1].sha256) for i in asset.made_from]
    named = {origin: file_name(origin, asset.name) if asset.source.type == "url" else origin for origin in wanted}
    return {named[origin]: path for origin, (path, _) in brought.items()}, tuple(known)


def _workshop_name(asset: LockedAsset, ingredient: Ingredient) -> str:
    """Where an ingredient lies while it is needed: names in a Hub repository may be anything, or equal but for case."""
    if asset.source.type == "hub":
        endings = re.search(r"(\.[A-Za-z0-9]{1,10}){0,2}$", ingredient.origin)
        return sha256_of_bytes(ingredient.origin.encode())[:24] + (endings[0] if endings else "")
    name = file_name(ingredient.origin, asset.name) if asset.source.type == "url" else ingredient.origin
    check_path(name, asset.name, way_without(asset.request))
    return name


def _files(
    asset: LockedAsset, manifest: Manifest, inputs: dict[str, Path], out: Path, root: Path, reporter: Reporter
) -> tuple[LockedAsset, list[tuple[LockedFile, Path]]]:
    """The files made, each with where it will lie; their digests come later."""
    request = manifest.requests.get(asset.name)
    what = f"{manifest.place(asset.name)}: `{asset.name}`"
    if asset.kind in ("model", "tokenizer"):
        return asset, _model_files(asset, inputs, out, what)
    if asset.source.type == "hub":
        return _from_parts(asset, inputs, out / "parquet", root, what, reporter)
    if isinstance(request, UrlRequest) and request.unpack:
        archive = next(iter(inputs.values()))
        unpacked = out / "unpacked"
        inputs = {name: unpacked / name for name in unpack(archive, unpacked, what)}
    if isinstance(request, UrlRequest | PathRequest) and request.convert:
        splits = convert(request.convert, inputs, splits_of_names, out / "parquet", what, request.separator)
        return _as_config(asset, CONFIG, request.convert, splits)
    how = "unpack" if isinstance(request, UrlRequest) and request.unpack else "download"
    return asset, [
        (LockedFile(f"{asset.folder}/{name}", 0, None, None, name, how), path) for name, path in inputs.items()
    ]


def _tell_rows(
    asset: LockedAsset, files: Sequence[tuple[LockedFile, Path]], manifest: Manifest, reporter: Reporter
) -> None:
    """Says what a conversion made, so that one column in place of five is seen here and not by a training run.

    Raises:
        UsageError: no row at all.
    """
    made, every = {file.path: path for file, path in files}, 0
    is_csv = any(file.made_by == "csv" for file, _ in files)
    for config, splits in asset.configs.items():
        for name, split in splits.items():
            footers = [parquet_footer(made[shard]) for shard in split.shards]
            rows, columns = sum(footer.rows for footer in footers), [column.name for column in footers[0].schema]
            every += rows
            more = ", ..." if len(columns) > _SHOWN_COLUMNS else ""
            what = f"{asset.name}: {config}/{name}"
            listed = f"{', '.join(columns[:_SHOWN_COLUMNS])}{more}"
            reporter.note(f"{what}: {human_count(rows, 'row')}, {human_count(len(columns), 'column')}: {listed}")
            if rows == 0:
                reporter.warn(f"{what}: has no row")
            elif is_csv and len(columns) == 1:
                reporter.warn(f"{what}: one column, called {columns[0]!a}: if this is text, write `convert: text`")
    if asset.configs and every == 0:
        raise UsageError(
            f"{manifest.place(asset.name)}: `{asset.name}`: not one row came out of "
            f"{human_count(len(asset.made_from), 'file')}.",
            "Is it the right file, and the right `convert`? A CSV begins with a line of names; plain text is "
            "`convert: text`.",
        )


def _is_pickle(asset: LockedAsset, origin: str) -> bool:
    return asset.kind == "model" and not origin.endswith(".json")


def _model_files(asset: LockedAsset, inputs: Mapping[str, Path], out: Path, what: str) -> list[tuple[LockedFile, Path]]:
    """Weights out of pickles, and configs that refer to code beside them, no longer to another repository."""
    from stage.weights import convert_pickles

    pickles = {origin: path for origin, path in inputs.items() if _is_pickle(asset, origin)}
    made = [
        (LockedFile(f"{asset.folder}/{name}", 0, None, None, origin, "safetensors"), out / name)
        for name, origin in (convert_pickles(pickles, out, what) if pickles else {}).items()
    ]
    for origin in inputs.keys() - pickles.keys():
        target = out / origin
        check_path(f"{asset.folder}/{origin}", what, way_without(asset.request))
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(made_local(origin, inputs[origin].read_bytes()))
        made.append((LockedFile(f"{asset.folder}/{origin}", 0, None, None, origin, "auto_map"), target))
    return made


def _from_parts(
    asset: LockedAsset, inputs: Mapping[str, Path], out: Path, root: Path, what: str, reporter: Reporter
) -> tuple[LockedAsset, list[tuple[LockedFile, Path]]]:
    """The config of a Hub dataset, out of files whose splits were known when it was resolved.

    What its card says of the columns is read from the card in the bundle: the same lock, the same bytes.
    """
    config = next(iter(asset.configs))
    parts = [(ingredient.origin, part) for ingredient in asset.made_from if (part := ingredient.part)]
    splits: dict[str, list[str]] = {}
    for origin, part in sorted(parts, key=lambda pair: natural(pair[0])):
        check_path(f"{asset.folder}/{config}/{part.split}.parquet", what, way_without(asset.request))
        splits.setdefault(part.split, []).append(origin)
    how = parts[0][1]

    def tell(said: str) -> None:
        reporter.note(f"{asset.name}: {config}: {said}")

    made = convert_splits(
        how.convert, inputs, splits, out, what, how.separator, features=_features(root, asset, config, tell), tell=tell
    )
    return _as_config(asset, config, how.convert, made)


def _features(root: Path, asset: LockedAsset, config: str, tell: Callable[[str], None]) -> Any:
    card = next((file for file in asset.files if file.path == f"{asset.folder}/{CARD}"), None)
    if card is None:
        return None
    if card.size > MAX_SIZE:
        tell(f"its card has {human_size(card.size)}: class names are read in one of up to {human_size(MAX_SIZE)}")
        return None
    metadata, _ = split_card((root / card.path).read_text(encoding="utf-8", errors="replace"))
    return info_of(metadata.get("dataset_info"), config).get("features")


def _as_config(
    asset: LockedAsset, config: str, how: str, splits: Mapping[str, Split]
) -> tuple[LockedAsset, list[tuple[LockedFile, Path]]]:
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
