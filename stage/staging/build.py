"""Makes the files that a bundle holds in another form than published: unpacked or converted.

Ingredients (an archive, CSV files, pickles) are downloaded to the workshop, a folder beside the
payload. There they are unpacked and converted; the results go to the payload. A complete lock
states the digests that must result; a new lock learns them here. The workshop is emptied when the
asset is in place, so a file that is damaged later is made again from new downloads.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from stage.bundle.inspect import parquet_footer
from stage.bundle.working_folder import WORKSHOP, WorkFolder
from stage.convert.archives import unpack
from stage.convert.convert import CONFIG, Split, convert, convert_splits
from stage.digests import FileDigests, hash_file, sha256_of_bytes
from stage.errors import DamageError, IncompleteError, PolicyError, StageError, UsageError
from stage.files import human_count, human_size
from stage.hub.parquet_layout import info_of, natural, splits_of_names
from stage.hub.remote_code import made_local
from stage.lock.manifest import Manifest
from stage.lock.model import CARD, Ingredient, LockedAsset, LockedFile, LockedSplit
from stage.lock.requests import PathRequest, UrlRequest, way_without
from stage.lock.yaml_lines import MAX_SIZE, split_card
from stage.paths import check_path
from stage.progress import Reporter
from stage.staging.sources.source import Sources
from stage.staging.sources.url import file_name
from stage.threads import together

_SHOWN_COLUMNS = 8

Progress = Callable[[int], None]
Digests = dict[str, FileDigests]


def check_may_make(asset: LockedAsset, manifest: Manifest, sources: Sources) -> None:
    """Checks before any download that the user allows the conversion.

    Raises:
        PolicyError: the ingredients are pickles, and `--allow-pickle` is not given.
    """
    pickles = [i.origin for i in asset.made_from if _is_pickle(asset, i.origin)]
    if pickles and not sources.allow_pickle:
        raise PolicyError(
            f"{manifest.place(asset.name)}: `{asset.name}`: its weights are made of pickles "
            f"({pickles[0]}), which have to be fetched again.",
            "Run with --allow-pickle: they are read with torch.load(weights_only=True) and "
            "converted to safetensors.",
        )


def build_asset(
    asset: LockedAsset,
    root: Path,
    folder: WorkFolder,
    manifest: Manifest,
    sources: Sources,
    reporter: Reporter,
    pin: Callable[[LockedAsset], None],
    *,
    offline_check: bool = True,
) -> tuple[LockedAsset, Digests]:
    """Makes the converted files of an asset, and puts them in place.

    Args:
        pin: called with the asset as soon as its ingredients' digests are known, so that an
            interrupted run does not download them again; and, if they cannot be converted, with
            the asset without these digests, so that a corrected file at the same address is taken.
        offline_check: whether the packages of an environment are imported.

    Returns:
        The asset with all its files; the digests of those made.

    Raises:
        StageError: what the sources, `unpack`, `convert` and `weights` refuse.
        DamageError: the results differ from the lock.
    """
    workdir = root / WORKSHOP / asset.name
    out = workdir / "made"
    if out.exists():
        shutil.rmtree(out)
    if asset.environment is not None:
        from stage.staging.sources.environment import make_environment  # imports much

        out.mkdir(parents=True)
        with reporter.at_work(f"make {asset.name}"):
            made, files = make_environment(
                asset, root / asset.folder, out, reporter, try_imports=offline_check
            )
    else:
        with reporter.bytes_bar(
            f"fetch {asset.name}", sum(i.size or 0 for i in asset.made_from)
        ) as progress:
            inputs, ingredients = _fetch_inputs(asset, workdir, manifest, sources, progress)
        pinned = replace(asset, made_from=ingredients)
        if pinned != asset:
            pin(pinned)
        made, files = _converted(pinned, manifest, inputs, out, root, reporter, pin)
    with reporter.bytes_bar(
        f"hash {asset.name}", sum(path.stat().st_size for _, path in files)
    ) as hashed:
        digests = {file.path: hash_file(path, progress=hashed) for file, path in files}
    known = [replace(f, size=digests[f.path].size, sha256=digests[f.path].sha256) for f, _ in files]
    complete = replace(made, files=(*(f for f in asset.files if not f.made_by), *known))
    _check_as_locked(asset, complete, manifest)
    folder.mark_unfinished({file.path for file, _ in files})
    for file, path in files:
        _put(path, root / file.path)
    shutil.rmtree(workdir, ignore_errors=True)
    return complete, digests


def _converted(
    asset: LockedAsset,
    manifest: Manifest,
    inputs: dict[str, Path],
    out: Path,
    root: Path,
    reporter: Reporter,
    pin: Callable[[LockedAsset], None],
) -> tuple[LockedAsset, list[tuple[LockedFile, Path]]]:
    """The converted files of an asset, and the asset with them. `pin` is as for `build_asset`."""
    reporter.detail(f"{asset.name}: made from {human_count(len(inputs), 'fetched or local file')}")
    try:
        with reporter.at_work(f"make {asset.name}"):
            made, files = _files(asset, manifest, inputs, out, root, reporter)
        _print_rows(made, files, manifest, reporter)
    except StageError as error:
        if not isinstance(error, IncompleteError):
            pin(_without_learned_digests(asset, manifest))
        raise
    return made, files


def _without_learned_digests(asset: LockedAsset, manifest: Manifest) -> LockedAsset:
    """A `url:` asset that never was made, with the digest that its entry states, or none."""
    request = manifest.requests.get(asset.name)
    if not isinstance(request, UrlRequest) or any(file.made_by for file in asset.files):
        return asset
    ingredients = (replace(i, size=None, sha256=request.sha256) for i in asset.made_from)
    return replace(asset, made_from=tuple(ingredients))


def _fetch_inputs(
    asset: LockedAsset, workdir: Path, manifest: Manifest, sources: Sources, progress: Progress
) -> tuple[dict[str, Path], tuple[Ingredient, ...]]:
    """Fetches all ingredients: their local paths by name, and the ingredients with digests."""
    wanted = {
        ingredient.origin: ingredient for ingredient in asset.made_from
    }  # a file may be in two splits

    def bring(ingredient: Ingredient) -> tuple[Path, FileDigests]:
        target = workdir / "originals" / _workshop_name(asset, ingredient)
        return sources.bring_ingredient(asset, ingredient, manifest, target, progress)

    brought = dict(
        zip(wanted, together(bring, wanted.values(), sources.at_once, sources.stop), strict=True)
    )
    known = [
        replace(i, size=brought[i.origin][1].size, sha256=brought[i.origin][1].sha256)
        for i in asset.made_from
    ]
    named = {
        origin: file_name(origin, asset.name) if asset.source.type == "url" else origin
        for origin in wanted
    }
    return {named[origin]: path for origin, (path, _) in brought.items()}, tuple(known)


def _workshop_name(asset: LockedAsset, ingredient: Ingredient) -> str:
    """The name of an ingredient in the workshop. Names of a Hub may differ in case only."""
    if asset.source.type == "hub":
        endings = re.search(r"(\.[A-Za-z0-9]{1,10}){0,2}$", ingredient.origin)
        return sha256_of_bytes(ingredient.origin.encode())[:24] + (endings[0] if endings else "")
    name = (
        file_name(ingredient.origin, asset.name)
        if asset.source.type == "url"
        else ingredient.origin
    )
    check_path(name, asset.name, way_without(asset.request))
    return name


def _files(
    asset: LockedAsset,
    manifest: Manifest,
    inputs: dict[str, Path],
    out: Path,
    root: Path,
    reporter: Reporter,
) -> tuple[LockedAsset, list[tuple[LockedFile, Path]]]:
    """Makes the files: each with its present path, without digests yet."""
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

        def report(said: str) -> None:
            reporter.note(f"{asset.name}: {said}")

        parquet = out / "parquet"
        splits = convert(
            request.convert, inputs, splits_of_names, parquet, what, request.separator, report
        )
        return _as_config(asset, CONFIG, request.convert, splits)
    how = "unpack" if isinstance(request, UrlRequest) and request.unpack else "download"
    return asset, [
        (LockedFile(f"{asset.folder}/{name}", 0, None, None, name, how), path)
        for name, path in inputs.items()
    ]


def _print_rows(
    asset: LockedAsset,
    files: Sequence[tuple[LockedFile, Path]],
    manifest: Manifest,
    reporter: Reporter,
) -> None:
    """Prints rows and columns: one column instead of five must be seen here, not in a training run.

    Raises:
        UsageError: no row at all.
    """
    made, every = {file.path: path for file, path in files}, 0
    is_csv = any(file.made_by == "csv" for file, _ in files)
    for config, splits in asset.configs.items():
        for name, split in splits.items():
            footers = [parquet_footer(made[shard]) for shard in split.shards]
            rows, columns = sum(footer.rows for footer in footers), footers[0].schema
            every += rows
            more = ", ..." if len(columns) > _SHOWN_COLUMNS else ""
            what = f"{asset.name}: {config}/{name}"
            listed = (
                ", ".join(f"{column.name} {column.type}" for column in columns[:_SHOWN_COLUMNS])
                + more
            )
            reporter.note(
                f"{what}: {human_count(rows, 'row')}, "
                f"{human_count(len(columns), 'column')}: {listed}"
            )
            if rows == 0:
                reporter.warn(f"{what}: has no row")
            elif is_csv and len(columns) == 1:
                reporter.warn(
                    f"{what}: one column, called {columns[0].name!a}: "
                    "if this is text, write `convert: text`"
                )
    if asset.configs and every == 0:
        raise UsageError(
            f"{manifest.place(asset.name)}: `{asset.name}`: not one row came out of "
            f"{human_count(len(asset.made_from), 'file')}.",
            "Is it the right file, and the right `convert`? A CSV begins with a line of names; "
            "plain text is `convert: text`.",
        )


def _is_pickle(asset: LockedAsset, origin: str) -> bool:
    return asset.kind == "model" and not origin.endswith(".json")


def _model_files(
    asset: LockedAsset, inputs: Mapping[str, Path], out: Path, what: str
) -> list[tuple[LockedFile, Path]]:
    """Converts pickles to safetensors, and makes configs refer to code beside them."""
    from stage.convert.pickled_weights import convert_pickles

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
        made.append(
            (LockedFile(f"{asset.folder}/{origin}", 0, None, None, origin, "auto_map"), target)
        )
    return made


def _from_parts(
    asset: LockedAsset,
    inputs: Mapping[str, Path],
    out: Path,
    root: Path,
    what: str,
    reporter: Reporter,
) -> tuple[LockedAsset, list[tuple[LockedFile, Path]]]:
    """Converts the files of a Hub dataset, whose splits are known since it was resolved.

    Facts about columns come from the card in the bundle: the same lock gives the same bytes.
    """
    config = next(iter(asset.configs))
    parts = [
        (ingredient.origin, part) for ingredient in asset.made_from if (part := ingredient.part)
    ]
    splits: dict[str, list[str]] = {}
    for origin, part in sorted(parts, key=lambda pair: natural(pair[0])):
        check_path(
            f"{asset.folder}/{config}/{part.split}.parquet", what, way_without(asset.request)
        )
        splits.setdefault(part.split, []).append(origin)
    how = parts[0][1]

    def report(said: str) -> None:
        reporter.note(f"{asset.name}: {config}: {said}")

    made = convert_splits(
        how.convert,
        inputs,
        splits,
        out,
        what,
        how.separator,
        features=_features(root, asset, config, report),
        note=report,
    )
    return _as_config(asset, config, how.convert, made)


def _features(root: Path, asset: LockedAsset, config: str, report: Callable[[str], None]) -> Any:
    card = next((file for file in asset.files if file.path == f"{asset.folder}/{CARD}"), None)
    if card is None:
        return None
    if card.size > MAX_SIZE:
        report(
            f"its card has {human_size(card.size)}: class names are read from cards "
            f"of up to {human_size(MAX_SIZE)}"
        )
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
    """Checks that the same bytes result as the lock states."""
    locked = {file.path: file.sha256 for file in before.files if file.made_by}
    if not locked:
        return
    came = {file.path: file.sha256 for file in after.files if file.made_by}
    different = sorted(path for path in {*locked, *came} if locked.get(path) != came.get(path))
    if different:
        raise DamageError(
            f"{before.name}: made again, {different[0]} differs from {manifest.lock_path.name} "
            f"({len(different)} of {len(came)} files).",
            f"{_what_decides(before)}: use the versions that the lock was made with, "
            "or accept new digests: "
            f"{manifest.update_command(before.name)}",
        )


def _what_decides(asset: LockedAsset) -> str:
    if asset.environment is not None:
        return "An environment holds airlift itself, and built wheels depend on their build tools"
    return "Parquet and safetensors bytes depend on the version of pyarrow, torch and safetensors"


def _put(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    source.replace(target)
