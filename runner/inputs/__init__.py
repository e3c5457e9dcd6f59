"""Asset names -> local paths: what a run reads of a bundle.

A run file names assets; this module returns their folders and files on this disk, with their
digests. It reads no payload. `verification` says whether `stage verify` found the bundle sound.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from runner.config.data import DatasetConfig
from runner.config.held_out import SplitPart
from runner.config.job_config import JobConfig
from runner.config.run_config import RunConfig
from runner.config.task_keys import keys_of_task, place_in_dataset
from runner.from_stage import (
    DamageError,
    Mistakes,
    Place,
    StageError,
    UsageError,
    human_count,
    quoted,
    suggest,
)
from stage.bundle.bundle import Bundle, failure_of, holds_bundle, verify
from stage.bundle.receipt import find_damage, find_receipt, remedy_for_damage
from stage.bundle.verifier import TAG_MANIFEST, VerificationReport, state_folder, suggest_fixes
from stage.environment.check import on_site
from stage.files import hash_file
from stage.lock.model import LockedAsset

NO_BUNDLE = Path(__file__).with_name("no-bundle")
"""A bundle with nothing in it: that of a command which needs nothing of a Hub."""


@dataclass(frozen=True)
class ModelInput:
    """A model's folder, loadable with `from_pretrained`.

    Attributes:
        source: a repository of the Hub, a path or an address.
        commit: the commit of the repository, or None.
        digests: file name -> sha256, for each file in the folder.
        settings: its config.json.
        preprocessing: its preprocessor_config.json, which models of images have; else empty.
        licence: as its source states it.
        new_tokens, new_special_tokens: what the run adds to the vocabulary.
    """

    asset: str
    path: Path
    source: str
    commit: str | None
    digests: Mapping[str, str]
    settings: Mapping[str, Any]
    preprocessing: Mapping[str, Any] = field(default_factory=dict)
    licence: str | None = None
    new_tokens: tuple[str, ...] = ()
    new_special_tokens: tuple[str, ...] = ()

    @property
    def tokenizer_digests(self) -> dict[str, str]:
        """File name -> sha256 of all files but weights: a tokenizer can depend on each of them.

        Tokens that the run adds count as a file.
        """
        found = {name: d for name, d in self.digests.items() if not name.endswith(".safetensors")}
        if self.new_tokens or self.new_special_tokens:
            text = json.dumps([self.new_tokens, self.new_special_tokens])
            found["tokens of the run file"] = sha256(text.encode()).hexdigest()
        return found

    def base_of_adapter(self, first: Path | None) -> str:
        """What `adapter_config.json` calls the base: the Hub's name, or a path for any machine.

        Args:
            first: the folder of the first weights, where they are another run's.
        """
        if first is not None:
            near = os.path.relpath(first)
            return str(first) if near.startswith("..") else f"./{near}"
        # Without `./` it could be another model, of the Hub.
        return self.source if self.commit else f"./{self.asset}"


@dataclass(frozen=True)
class SplitInput:
    """The parquet files of one split, in order.

    Attributes:
        rows: that are read.
        columns: name -> Arrow type.
        part: which rows of the files are read; None: all.
    """

    name: str
    files: tuple[Path, ...]
    digests: tuple[str, ...]
    rows: int
    columns: Mapping[str, str]
    part: SplitPart | None = None

    @property
    def share(self) -> float:
        """Of the rows of its files, how many are read."""
        return self.rows / max(1, self.part.of) if self.part else 1.0


@dataclass(frozen=True)
class DatasetInput:
    """One dataset of a run.

    Attributes:
        settings: its settings in the run file.
        source: a repository of the Hub, a path or an address.
        commit: the commit of the repository, or None.
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
    """An environment's folder in the bundle: its image and the scripts that unpack it.

    Attributes:
        tree: the digest of all its files, the same in every prefix.
        size: bytes on disk when unpacked.
        files: the number of files when unpacked.
        packages: their names, as the lock has them; empty: not known.
    """

    asset: str
    path: Path
    tree: str
    size: int
    files: int
    packages: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class JobInputs:
    """What any run reads of its bundle; `environment` is None if it has none."""

    bundle: Path
    bundle_id: str
    environment: EnvironmentInput | None = None


@dataclass(frozen=True, kw_only=True)
class Inputs(JobInputs):
    """The resolved inputs of a training."""

    model: ModelInput
    datasets: tuple[DatasetInput, ...]


class ClosedError(UsageError):
    """A file of the bundle is there, and this user has no right to read it."""


def resolve(config: RunConfig, bundle_path: Path) -> Inputs:
    """Finds a run's model, datasets and environment in a bundle.

    Raises:
        UsageError: not a complete bundle; or all assets, configs, splits and columns that are not
            there. Names the existing ones.
        DamageError: the bundle's lock is damaged, or the run file asks for another bundle; or an
            asset is not usable, and the bundle is known to be damaged or has wrong names or sizes.
    """
    found = find_mistakes(config, bundle_path, frozenset())
    # None only where keys are wrong: a run file without mistakes names a model and all datasets,
    # and what is not in the bundle was raised as a mistake.
    assert found is not None
    return found


def find_mistakes(config: RunConfig, bundle_path: Path, wrong: Set[str]) -> Inputs | None:
    """As `resolve`, for a run file with mistakes: the values of the keys in `wrong` are unknown.

    None: the model, or the training split of a dataset, is not known.
    """
    bundle = _open(config, bundle_path)
    mistakes = Mistakes()
    inputs = _resolve(config, bundle, wrong, mistakes)
    if mistakes.found and not any(isinstance(error, ClosedError) for error in mistakes.found):
        # A damaged bundle can look like a run file that does not fit. Damage is the first cause.
        check_known_damage(bundle_path, os.environ)
        check_names_and_sizes(bundle_path)
    mistakes.check(str(config.path))
    return inputs


def inputs_of_command(config: JobConfig, bundle_path: Path) -> JobInputs:
    """Finds what the run of a command reads in a bundle, beside what it asks for when it runs.

    Raises:
        UsageError: not a complete bundle; or the environment is not there.
        DamageError: the bundle's lock is damaged, or the run file asks for another bundle.
    """
    bundle = _open(config, bundle_path)
    return JobInputs(
        bundle=bundle.root.resolve(),
        bundle_id=bundle.id,
        environment=environment_input(config, bundle),
    )


def _open(config: JobConfig, bundle_path: Path) -> Bundle:
    try:
        bundle = Bundle.open(bundle_path)
    except DamageError:
        check_known_damage(bundle_path, os.environ)  # names the command that repairs it
        raise
    if config.bundle.id not in (None, bundle.id):
        raise DamageError(
            f"`bundle.id` asks for {config.bundle.id}; {bundle_path} "
            f"is another bundle: {bundle.id}.",
            "Give the folder of the bundle that is asked for with --bundle. If this one is meant, "
            f"write its id: bundle: {{id: {bundle.id}}}",
            place=config.place("bundle.id"),
        )
    return bundle


def _resolve(
    config: RunConfig, bundle: Bundle, wrong: Set[str], mistakes: Mistakes
) -> Inputs | None:
    model = environment = None
    if not wrong & {"model", "model.asset"}:
        with mistakes:
            model = _model(config, bundle)
    datasets = []
    for number, wanted in enumerate(config.sources):
        of_list = None if config.dataset is not None else number
        name = "dataset" if of_list is None else f"datasets.{number}"
        unknown = {k.removeprefix(f"{name}.") for k in wrong if k.startswith(f"{name}.")}
        if not unknown & {"asset", "config"}:
            with mistakes:
                unknown |= wrong & {"task"}
                where = place_in_dataset(config.lines, of_list)
                if (data := _dataset(config, bundle, wanted, where, unknown)) is not None:
                    datasets.append(data)
    if not wrong & {"environment", "environment.asset"}:
        with mistakes:
            environment = environment_input(config, bundle)
    if model is None or len(datasets) < len(config.sources):
        return None  # only where a key is wrong: what the bundle lacks is among the mistakes
    return Inputs(
        bundle=bundle.root.resolve(),
        bundle_id=bundle.id,
        model=model,
        datasets=tuple(datasets),
        environment=environment,
    )


def _asset(bundle: Bundle, name: str, place: Place) -> LockedAsset:
    """An asset by its name; `place` is where the run file names it, for the message."""
    try:
        return bundle.asset(name)
    except UsageError as error:
        same = [a.name for a in bundle.lock.assets.values() if a.source.location == name]
        raise UsageError(
            f"the bundle in {bundle.root} has no asset of that name.",
            f"Write `{same[0]}`, the asset's name: {name} is its repository."
            if same
            else error.remedy,
            place=place,
        ) from None


def check_file(path: Path, digest: str) -> None:
    """Reads a file of a bundle, of any size, and compares it with its sha256 in the lock.

    Raises:
        DamageError: they differ, or the file cannot be read.
    """
    if _digest_of(path) != digest:
        raise unreadable(path, "its bytes are not those that were fetched", "damaged")


def tag_manifest_digest(bundle: Path) -> str:
    """The sha256 of a bundle's tag manifest: equal digests mean equal bundles.

    Raises:
        DamageError: it cannot be read.
    """
    return _digest_of(bundle / TAG_MANIFEST)


def read_checked(path: Path, digest: str) -> bytes:
    """Reads a small file of a bundle; raises what `check_file` raises."""
    check_file(path, digest)
    return path.read_bytes()


def _digest_of(path: Path) -> str:
    try:
        return hash_file(path).sha256
    except OSError as error:
        raise unreadable(path, error.strerror or str(error)) from None


def check_not_inside(folder: Path, bundle: Path) -> None:
    """Checks that a folder is outside the bundle: an extra file would make `stage verify` fail.

    Args:
        folder: the folder to be written; it need not exist.

    Raises:
        UsageError: it is the bundle, or inside it.
    """
    if folder.resolve().is_relative_to(bundle.resolve()):
        raise UsageError(
            f"{folder}: inside the bundle {bundle}; extra files there would damage the bundle.",
            "Give an --output outside the bundle.",
        )


def environment_input(config: JobConfig, bundle: Bundle) -> EnvironmentInput | None:
    """Finds the environment that the run file names; None: it names none.

    Raises:
        UsageError: no such asset, or it is not an environment.
        DamageError: its env.json is damaged.
    """
    if config.environment is None:
        return None
    name = config.environment.asset
    place, written = config.place("environment.asset"), f"environment.asset: {name}"
    asset = _asset(bundle, name, replace(place, name=written))
    if asset.kind != "environment":
        raise UsageError(
            f"`{written}` is a {asset.kind}, not an environment.",
            "`stage show BUNDLE` lists the assets with their kinds.",
            place=place,
        )
    folder = bundle.asset_path(asset.name).resolve()
    try:
        facts = json.loads((folder / "env.json").read_text(encoding="utf-8"))
        return EnvironmentInput(
            asset=asset.name,
            path=folder,
            tree=str(facts["tree"]),
            size=int(facts["size"]),
            files=int(facts["files"]) + int(facts["modules"]),
            packages=(
                *(p.name for p in (asset.environment.packages if asset.environment else ())),
                *facts.get("provides", {}),
            ),
        )
    except OSError as error:
        raise unreadable(folder / "env.json", error.strerror or str(error)) from None
    except (ValueError, KeyError, TypeError):
        raise DamageError(
            f"{folder / 'env.json'}: not what `stage fetch` wrote.", remedy_for_damage(bundle.root)
        ) from None


def unreadable(path: Path, why: str, what: str = "cannot be read") -> StageError:
    """The error of a file in a bundle that cannot be read: damage, or a right that is missing.

    Args:
        why: the message of the operating system or of the library.
        what: the file is.
    """
    if why == os.strerror(errno.EACCES):
        return ClosedError(
            f"{path}: you may not read it ({why}); it is not damaged.",
            f"`namei -l {quoted(path)}` shows which right is missing; its owner can add it: "
            "chmod a+rX",
        )
    bundle = next((folder for folder in (path, *path.parents) if holds_bundle(folder)), path.parent)
    return DamageError(f"{path}: {what}: {why}.", remedy_for_damage(bundle))


def _model(config: RunConfig, bundle: Bundle) -> ModelInput:
    place, written = config.place("model.asset"), f"model.asset: {config.model.asset}"
    asset = _asset(bundle, config.model.asset, replace(place, name=written))
    folder = bundle.asset_path(asset.name).resolve()
    if asset.kind != "model" and not (asset.kind == "files" and (folder / "config.json").is_file()):
        what = f"is a {asset.kind}"
        if asset.kind == "files":
            what = "is plain files without a config.json"
        raise UsageError(
            f"`{written}` {what}, not a model.",
            "Name an asset that was staged with `model:`, or with `path:` from a folder that "
            "`save_pretrained` wrote.",
            place=place,
        )
    preprocessing = folder / "preprocessor_config.json"
    digests = {
        file.path.removeprefix(f"{asset.folder}/"): file.sha256 or "" for file in asset.files
    }
    return ModelInput(
        asset=asset.name,
        path=folder,
        source=asset.source.location,
        commit=asset.source.commit,
        digests=digests,
        settings=_settings(folder / "config.json", bundle, digests),
        preprocessing=_settings(preprocessing, bundle, digests)
        if preprocessing.name in digests
        else {},
        licence=asset.licence,
        new_tokens=config.tokenizer.add_tokens,
        new_special_tokens=config.tokenizer.add_special_tokens,
    )


def _settings(path: Path, bundle: Bundle, digests: Mapping[str, str]) -> dict[str, Any]:
    """Reads a JSON file of a model and checks its digest.

    Args:
        digests: file name -> sha256 of the model's folder, from the lock.
    """
    if path.name not in digests:
        raise UsageError(
            f"{path}: the model has no {path.name}, so nothing can load it.",
            f"Stage a model that has one: see `stage show {quoted(bundle.root)}`.",
        )
    data = read_checked(path, digests[path.name])
    try:
        settings = json.loads(data)
    except ValueError:
        raise UsageError(f"{path}: not JSON.", _CORRECT_IT) from None
    if not isinstance(settings, dict):
        raise UsageError(f"{path}: not a model's config.", _CORRECT_IT)
    return settings


_CORRECT_IT = (
    "Its bytes are those that were fetched: correct the file at its source, then "
    "stage fetch MANIFEST --update ASSET -o BUNDLE."
)
_CONVERSIONS = {
    ".parquet": "parquet",
    **dict.fromkeys((".csv", ".tsv"), "csv"),
    **dict.fromkeys((".jsonl", ".ndjson"), "jsonl"),
    ".json": "json",
    ".arrow": "arrow",
    **dict.fromkeys((".png", ".jpg", ".jpeg"), "imagefolder"),
    ".txt": "text",
}
"""Suffix of a plain file -> what makes a dataset of it, in a manifest."""


def _dataset(
    config: RunConfig,
    bundle: Bundle,
    wanted: DatasetConfig,
    where: Callable[[str], Place],
    unknown: Set[str],
) -> DatasetInput | None:
    asset = _asset(bundle, wanted.asset, where(f"asset: {wanted.asset}"))
    if asset.kind != "dataset":
        is_files = asset.kind == "files"
        endings = {Path(file.path).suffix for file in asset.files}
        how = next((h for ending, h in _CONVERSIONS.items() if ending in endings), "")
        place = where(f"asset: {asset.name}")
        raise UsageError(
            f"`{place.name}` is {'plain files' if is_files else f'a {asset.kind}'}, not a dataset.",
            f"On the laptop, add `convert: {how}` to its entry in the manifest, and fetch again."
            if is_files and how
            else "`stage show BUNDLE` lists the assets with their kinds.",
            place=replace(place, name=""),
        )
    name, splits = _dataset_config(wanted, asset, where)
    mistakes = Mistakes()
    found: dict[str, SplitInput] = {}
    validation = wanted.validation
    if wanted.holds_out or (validation == "auto" and "validation" not in splits):
        validation = None  # what is held out is a part of the training split
    elif validation == "auto":
        validation = "validation"
    for role, which in (("train", wanted.train), ("validation", validation)):
        if which is not None and role not in unknown:
            with mistakes:
                if which not in splits:
                    has = f"It has: {', '.join(splits)}."
                    if role == "validation":
                        has += " Or hold out a part of the training split: validation: 10%"
                    raise UsageError(
                        f"the dataset `{asset.name}` ({name}) has no such split in this bundle.",
                        suggest(which, splits, has),
                        place=where(f"{role}: {which}"),
                    )
                split = split_input(bundle, asset, which, splits[which])
                if not mistakes.found and "task" not in unknown:
                    task = keys_of_task(config.task)
                    task.check_columns(wanted, split.columns, which, where, mistakes, unknown)
                found[role] = split
    if wanted.holds_out and "train" in found and "validation" not in unknown:
        with mistakes:
            found["train"], found["validation"] = _parts(wanted, found["train"], where)
    mistakes.check(str(config.path))
    if "train" not in found:
        return None  # only where the key `train` is wrong: else a mistake was raised above
    return DatasetInput(
        asset=asset.name,
        config=name,
        train=found["train"],
        validation=found.get("validation"),
        settings=wanted,
        source=asset.source.location,
        commit=asset.source.commit,
        licence=asset.licence,
    )


def _parts(
    wanted: DatasetConfig, split: SplitInput, where: Callable[[str], Place]
) -> tuple[SplitInput, SplitInput]:
    """Divides a split into the rows to train on, and those that are held out."""
    share = str(wanted.validation)
    if split.rows < 2:
        raise UsageError(
            f"the split `{split.name}` has "
            f"{human_count(split.rows, 'row')}: nothing can be held out.",
            "Set validation: null, or another split (`stage show BUNDLE` lists them).",
            place=where(f"validation: {share}"),
        )
    parts = (SplitPart(split.rows, share, wanted.validation_seed, held) for held in (False, True))
    kept, held_out = (replace(split, rows=part.rows, part=part) for part in parts)
    return kept, replace(held_out, name=f"{share} of {split.name}")


def remedy_as_published(name: str) -> str:
    """How a dataset whose files travel as published becomes parquet, which has columns."""
    return (
        f"On the laptop, remove `include` and `exclude` of `{name}` from its manifest (its "
        "`config` and `splits` choose then), and `stage fetch` again."
    )


def _dataset_config(
    wanted: DatasetConfig, asset: LockedAsset, where: Callable[[str], Place]
) -> tuple[str, Mapping[str, Any]]:
    have = ", ".join(asset.configs)
    if asset.is_as_published:
        raise UsageError(
            f"the dataset `{asset.name}` has no splits: its files travel as published, for scripts "
            "under `runner exec`.",
            remedy_as_published(asset.name),
            place=where(f"config: {wanted.config}"),
        )
    if wanted.config == "auto" and len(asset.configs) == 1:  # as `stage fetch` writes it
        return next(iter(asset.configs.items()))
    if wanted.config not in asset.configs:
        raise UsageError(
            f"the dataset `{asset.name}` has no such config.",
            suggest(wanted.config, asset.configs, f"It has: {have}"),
            place=where(f"config: {wanted.config}"),
        )
    return wanted.config, asset.configs[wanted.config]


def split_input(bundle: Bundle, asset: LockedAsset, name: str, locked: Any) -> SplitInput:
    """A split of a dataset.

    Args:
        locked: what the lock says about it; a bundle is complete, so it has rows and columns.
    """
    digests = {file.path: file.sha256 or "" for file in asset.files}
    return SplitInput(
        name=name,
        files=tuple((bundle.root / shard).resolve() for shard in locked.shards),
        digests=tuple(digests[shard] for shard in locked.shards),
        rows=locked.rows,
        columns={column.name: column.type for column in locked.schema},
    )


def environments(bundle: Path) -> list[Path]:
    """The folders of the environments in a bundle."""
    opened = Bundle.open(bundle)
    assets = opened.lock.assets.values()
    return [opened.asset_path(asset.name) for asset in assets if asset.kind == "environment"]


def check_site(path: list[str] | None = None) -> None:
    """Refuses an environment on a site's own torch that finds another one by now.

    Args:
        path: where its Python looks; None: `sys.path`.

    Raises:
        UsageError: with what it was made on and what is found.
    """
    if problem := on_site.change_of_site(Path(sys.prefix), path):
        raise UsageError(problem, on_site.ANOTHER)


def running_tree(prefix: Path = Path(sys.prefix)) -> str | None:
    """The tree digest of the environment at `prefix`; None: it is not from a bundle."""
    description = prefix / ".airlift" / "env.json"
    try:
        return str(json.loads(description.read_text(encoding="utf-8"))["tree"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


FILES_NAMED = 5  # at most so many damaged files are named in a message


class Verification(NamedTuple):
    """Whether a receipt of `stage verify` is valid for a bundle now, and a text on it."""

    holds: bool
    text: str


def verification(bundle: Path, environ: Mapping[str, str]) -> Verification:
    """Reports whether a bundle is verified. Calls `stat` once per payload file; reads none.

    Without a valid receipt it compares names and sizes, as `stage verify --fast` does.

    Raises:
        DamageError: a verification found damage, or names or sizes differ from the lock.
        IncompleteError: files or folders may not be looked at.
    """
    check_known_damage(bundle, environ)
    receipt = find_receipt(state_folder(environ), bundle)
    if isinstance(receipt, str):
        check_names_and_sizes(bundle)
        return Verification(False, f"{receipt}; names and sizes are right")
    text = f"{receipt.describe(time.time())}, unchanged since"
    return Verification(True, text)


def check_known_damage(bundle: Path, environ: Mapping[str, str]) -> None:
    """Checks that this user's last verification found no damage that is still there.

    Raises:
        DamageError: it did; names the damaged files and what to do.
    """
    known = find_damage(state_folder(environ), bundle)
    if known is not None:
        raise _damage(bundle, known.report, known.describe(time.time()), known.written)


def check_names_and_sizes(bundle: Path) -> None:
    """Compares names, kinds and sizes with the lock, as `stage verify --fast`. Reads no payload.

    Raises:
        DamageError, IncompleteError: as for `verification`; with the files and what to do.
    """
    report = verify(bundle, "fast")
    if not report.ok:
        raise _damage(bundle, report, "by its names and sizes", None)


def _damage(bundle: Path, report: VerificationReport, how: str, written: Path | None) -> StageError:
    named = [f"{finding.path} ({finding.problem})" for finding in report.findings[:FILES_NAMED]]
    if more := len(report.findings) - len(named):
        named.append(f"and {more} more")
    advice = [*suggest_fixes(report, written), f"Then: stage verify {quoted(bundle)}"]
    failure = failure_of(report)
    what = "damaged" if failure is DamageError else "cannot be looked at"
    return failure(f"{bundle}: {what} ({how}): {', '.join(named)}.", " ".join(advice))
