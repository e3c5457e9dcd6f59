"""Checks before a download: files that patterns omit, adapters without their base model, and
folders where no bundle may be made.

Patterns may omit files that a model needs to load. The load test at the end of a fetch
(`stage.staging.load_test`) would find that hours later. The same holds for the model that an
adapter was trained on.

A bundle must not be made inside another bundle, which would then have extra files, nor inside a
folder that it takes in, which would then change with each fetch.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from stage.bundle import bundle as layout
from stage.bundle.inspect import TOKENIZER, WEIGHTS
from stage.errors import UsageError, quoted
from stage.files import join_limited
from stage.hub.model_files import matches
from stage.lock.manifest import Manifest
from stage.lock.model import EXCLUDED, NOT_INCLUDED, LockedAsset
from stage.lock.requests import PathRequest
from stage.lock.yaml_lines import scalar
from stage.staging.new_manifest import asset_names
from stage.staging.sources.listing import local_base

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
    if "include" not in asset.request:  # who excludes weights or a tokenizer by name knows it
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
    raise UsageError(
        f"{adapters}, which the manifest does not ask for by this name.",
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
        if layout.holds_bundle(outer):
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
        if not any(matches(f"{inside}/{layout.LOCK}", pattern) for pattern in request.exclude):
            # Of the whole folder nothing would be left.
            omit = f', or exclude it: exclude: ["{inside}/**"]' if here != base else "."
            raise UsageError(
                f"{manifest.place(name, 'path')}: `{name}`: the bundle {root} would lie inside "
                f"{request.path}, which it takes in: it would change with each fetch.",
                "Choose a folder outside of it: -o "
                f"{quoted(base.with_name(f'{base.name}-bundle'))}{omit}",
            )
