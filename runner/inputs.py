"""Asset names -> local paths: the one place where `runner` looks into a bundle.

A run file names assets; out come folders and files on this disk, with the digests that say exactly which they are.
Nothing of the payload is read here; `verification` tells whether somebody read it all and found it sound.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from runner.config import RunConfig
from runner.data.columns import check_columns, place_of
from runner.data_config import DatasetConfig
from runner.errors import DamageError, UsageError
from stage.asset import LockedAsset
from stage.bundle import Bundle
from stage.receipts import find as find_receipt
from stage.receipts import state_folder
from stage.serve.catalogue import DEFAULT_REVISION, Catalogue, ServedRepository


@dataclass(frozen=True)
class ModelInput:
    """A model's folder, loadable with `from_pretrained`.

    Attributes:
        digests: file name -> sha256 of every file in it.
        settings: its config.json.
        preprocessing: its preprocessor_config.json, which models of images have; empty without one.
        licence: as its source states it.
    """

    asset: str
    path: Path
    source: str
    commit: str | None
    digests: Mapping[str, str]
    settings: Mapping[str, Any]
    preprocessing: Mapping[str, Any] = field(default_factory=dict)
    licence: str | None = None

    @property
    def tokenizer_digests(self) -> dict[str, str]:
        """sha256 of everything that is not weights: what a tokenizer can depend on."""
        return {name: digest for name, digest in self.digests.items() if not name.endswith(".safetensors")}


@dataclass(frozen=True)
class SplitInput:
    """The parquet files of one split in order; `columns` is name -> Arrow type."""

    name: str
    files: tuple[Path, ...]
    digests: tuple[str, ...]
    rows: int
    columns: Mapping[str, str]


@dataclass(frozen=True)
class DatasetInput:
    """One dataset of a run.

    Attributes:
        settings: what the run file says of it.
        source, commit: as of a model: a repository of the Hub at a commit, or a path or an address and None.
        licence: as its source states it.
    """

    asset: str
    config: str
    train: SplitInput
    validation: SplitInput | None
    settings: DatasetConfig
    source: str
    commit: str | None
    licence: str | None


@dataclass(frozen=True)
class EnvironmentInput:
    """An environment's folder in the bundle: its image and what unpacks it.

    Attributes:
        tree: digest of all its files, the same in every prefix.
        size: bytes on disk once unpacked; `files`: how many files that is.
    """

    asset: str
    path: Path
    tree: str
    size: int
    files: int


@dataclass(frozen=True)
class Inputs:
    """What a run reads, resolved; `environment` is None where the run file names none."""

    bundle: Path
    bundle_id: str
    model: ModelInput
    datasets: tuple[DatasetInput, ...]
    environment: EnvironmentInput | None = None


class Verification(NamedTuple):
    """Whether `stage verify` vouches for a bundle as it lies here now; and what to say of it."""

    holds: bool
    words: str


def resolve(config: RunConfig, bundle_path: Path) -> Inputs:
    """Finds a run's model and datasets in a bundle.

    Raises:
        UsageError: not a finished bundle, no such asset, config, split or column; says what there is.
        DamageError: the bundle's lock is damaged.
    """
    bundle = Bundle.open(bundle_path)
    numbers = [None] if config.dataset is not None else range(len(config.sources))
    datasets = [
        _dataset(config, bundle, s, place_of(config.path, n)) for s, n in zip(config.sources, numbers, strict=True)
    ]
    return Inputs(
        bundle=bundle.root.resolve(),
        bundle_id=bundle.id,
        model=_model(config, bundle),
        datasets=tuple(datasets),
        environment=environment_input(config, bundle),
    )


def refuse_inside(folder: Path, bundle: Path) -> None:
    """Refuses to write into a bundle: with a file more, nobody's `stage verify` finds it sound.

    Args:
        folder: to be written; need not be there yet.

    Raises:
        UsageError: it is the bundle, or inside it.
    """
    if folder.resolve().is_relative_to(bundle.resolve()):
        raise UsageError(
            f"{folder}: inside the bundle {bundle}, which would be spoilt by it.",
            "Give an --output outside the bundle.",
        )


def environment_input(config: RunConfig, bundle: Bundle) -> EnvironmentInput | None:
    """The environment that the run file names; None: it names none.

    Raises:
        UsageError: no such asset, or no environment.
        DamageError: its description is damaged.
    """
    if config.environment is None:
        return None
    asset = bundle.asset(config.environment.asset)
    if asset.kind != "environment":
        raise UsageError(f"{config.path}: `environment.asset: {asset.name}` is a {asset.kind}, not an environment.")
    folder = bundle.asset_path(asset.name).resolve()
    try:
        facts = json.loads((folder / "env.json").read_text(encoding="utf-8"))
        return EnvironmentInput(
            asset=asset.name,
            path=folder,
            tree=str(facts["tree"]),
            size=int(facts["size"]),
            files=int(facts["files"]) + int(facts["modules"]),
        )
    except (OSError, ValueError, KeyError, TypeError):
        raise DamageError(
            f"{folder / 'env.json'}: not what `stage fetch` wrote.", f"stage verify {bundle.root}"
        ) from None


def verification(bundle: Path, environ: Mapping[str, str]) -> Verification:
    """What this user's receipts say of a bundle. Looks at the `stat` of every payload file; reads none."""
    receipt = find_receipt(state_folder(environ), bundle)
    if isinstance(receipt, str):
        return Verification(False, receipt)
    return Verification(True, f"{receipt.in_words(time.time())}, unchanged since")


def _model(config: RunConfig, bundle: Bundle) -> ModelInput:
    asset = bundle.asset(config.model.asset)
    folder = bundle.asset_path(asset.name).resolve()
    if asset.kind != "model" and not (asset.kind == "files" and (folder / "config.json").is_file()):
        what = "is plain files without a config.json" if asset.kind == "files" else f"is a {asset.kind}"
        raise UsageError(
            f"{config.path}: `model.asset: {asset.name}` {what}, not a model.",
            "Name an asset that was staged with `model:`, or with `path:` from a folder that `save_pretrained` wrote.",
        )
    preprocessing = folder / "preprocessor_config.json"
    return ModelInput(
        asset=asset.name,
        path=folder,
        source=asset.source.location,
        commit=asset.source.commit,
        digests={file.path.removeprefix(f"{asset.folder}/"): file.sha256 or "" for file in asset.files},
        settings=_settings(folder / "config.json", bundle),
        preprocessing=_settings(preprocessing, bundle) if preprocessing.exists() else {},
        licence=asset.licence,
    )


def _settings(path: Path, bundle: Bundle) -> dict[str, Any]:
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(
            f"{path}: the model has no config.json, so nothing can load it.",
            f"If the bundle should have it: stage verify {bundle.root}",
        ) from None
    except ValueError:
        raise UsageError(f"{path}: not JSON.", f"stage verify {bundle.root}") from None
    if not isinstance(settings, dict):
        raise UsageError(f"{path}: not a model's config.", f"stage verify {bundle.root}")
    return settings


def _dataset(config: RunConfig, bundle: Bundle, wanted: DatasetConfig, where: Callable[[str], str]) -> DatasetInput:
    asset = bundle.asset(wanted.asset)
    if asset.kind != "dataset":
        raise UsageError(f"{where(f'asset: {asset.name}')} is a {asset.kind}, not a dataset.")
    name, splits = _dataset_config(config, wanted, asset)

    def split(which: str) -> SplitInput:
        if which not in splits:
            raise UsageError(
                f"{config.path}: dataset `{asset.name}` ({name}) has no split `{which}` in this bundle.",
                f"It has: {', '.join(splits)}.",
            )
        columns = {column.name: column.type for column in splits[which].schema}
        check_columns(config.task, wanted, columns, which, where)
        return _split(bundle, asset, which, splits[which], columns)

    validation = wanted.validation
    if validation == "auto":
        validation = "validation" if "validation" in splits else None
    return DatasetInput(
        asset=asset.name,
        config=name,
        train=split(wanted.train),
        validation=split(validation) if validation else None,
        settings=wanted,
        source=asset.source.location,
        commit=asset.source.commit,
        licence=asset.licence,
    )


def _dataset_config(config: RunConfig, wanted: DatasetConfig, asset: LockedAsset) -> tuple[str, Mapping[str, Any]]:
    have = ", ".join(asset.configs)
    if wanted.config == "auto":
        if len(asset.configs) != 1:
            raise UsageError(
                f"{config.path}: dataset `{asset.name}` has several configs.", f"Set dataset.config: {have}"
            )
        return next(iter(asset.configs.items()))
    if wanted.config not in asset.configs:
        raise UsageError(f"{config.path}: dataset `{asset.name}` has no config `{wanted.config}`.", f"It has: {have}")
    return wanted.config, asset.configs[wanted.config]


def _split(bundle: Bundle, asset: LockedAsset, name: str, locked: Any, columns: Mapping[str, str]) -> SplitInput:
    digests = {file.path: file.sha256 or "" for file in asset.files}
    return SplitInput(
        name=name,
        files=tuple((bundle.root / shard).resolve() for shard in locked.shards),
        digests=tuple(digests[shard] for shard in locked.shards),
        rows=locked.rows,
        columns=columns,
    )


@dataclass(frozen=True)
class HubRepository:
    """A repository of a bundle as clients of the Hub know it.

    Attributes:
        kind: `models` or `datasets`.
        id: `org/name`, or an old name without organisation that leads there.
        refs: branch or tag -> commit.
        snapshots: commit -> path in the repository -> where it lies, or its bytes where it was written for clients.
    """

    kind: str
    id: str
    refs: Mapping[str, str]
    snapshots: Mapping[str, Mapping[str, Path | bytes]]


def hub_repositories(bundle_path: Path) -> tuple[str, list[HubRepository]]:
    """A bundle's id, and its models and datasets by every name the Hub's clients may use for them.

    Raises:
        UsageError: not a finished bundle.
        DamageError: the bundle's lock is damaged.
    """
    bundle = Bundle.open(bundle_path.resolve())
    found = Catalogue.of(bundle).repositories
    return bundle.id, [_hub_repository(kind, name, served) for (kind, name), served in found.items()]


def _hub_repository(kind: str, name: str, served: ServedRepository) -> HubRepository:
    refs = {DEFAULT_REVISION: served.versions[0].commit}
    for version in reversed(served.versions):
        refs |= {revision: version.commit for revision in version.revisions if revision != version.commit}
    snapshots = {v.commit: {path: file.content for path, file in v.files.items()} for v in served.versions}
    return HubRepository(kind, name, refs, snapshots)
