"""Asset names -> local paths: the only module of `runner` that reads a bundle.

A run file names assets; this module returns their folders and files on this disk, with their
digests. It reads no payload. `verification` reports whether `stage verify` found the bundle sound,
and rejects a bundle that is known to be damaged.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from runner.config.columns import check_columns, place_of
from runner.config.data import DatasetConfig
from runner.config.run_config import RunConfig
from runner.config.samples.held_out import Part
from runner.errors import DamageError, StageError, UsageError, human_count, suggest
from runner.resolved import CodeInput as CodeInput
from runner.resolved import DatasetInput as DatasetInput
from runner.resolved import EnvironmentInput as EnvironmentInput
from runner.resolved import Inputs as Inputs
from runner.resolved import ModelInput as ModelInput
from runner.resolved import SplitInput as SplitInput
from stage.bundle.bundle import Bundle as Bundle  # for runner.examples
from stage.bundle.bundle import holds_bundle as holds_bundle  # for runner.cli
from stage.bundle.inspect import index_problems as index_problems  # for runner.preflight
from stage.bundle.inspect import safetensors_header as safetensors_header  # for runner.plan
from stage.environment.compat import imports as imports  # for runner.launch.surroundings
from stage.environment.compat.torch_builds import runs_on as runs_on  # for the same
from stage.lock.model import LockedAsset
from stage.serve.catalogue import DEFAULT_REVISION, Catalogue, ServedRepository
from stage.verify.advice import remedy_for_damage, suggest_fixes
from stage.verify.receipt import find as find_receipt
from stage.verify.receipt import find_damage
from stage.verify.receipt import state_folder as state_folder  # for runner.preflight
from stage.verify.report import BY_ID, VerificationReport
from stage.verify.verify import verify

FILES_NAMED = 5  # at most so many damaged files are named in a message


class ClosedError(UsageError):
    """A file of the bundle is there, and this user has no right to read it."""


class Verification(NamedTuple):
    """Whether a receipt of `stage verify` is valid for a bundle now, and a text on it."""

    holds: bool
    text: str


def resolve(config: RunConfig, bundle_path: Path) -> Inputs:
    """Finds a run's model, datasets and environment in a bundle.

    Raises:
        UsageError: not a complete bundle; or no such asset, config, split or column. Names the
            existing ones.
        DamageError: the bundle's lock is damaged, or the run file asks for another bundle; or an
            asset is not usable, and the bundle is known to be damaged or has wrong names or sizes.
    """
    try:
        bundle = Bundle.open(bundle_path)
    except DamageError:
        check_known_damage(bundle_path, os.environ)  # names the command that repairs it
        raise
    if config.bundle.id not in (None, bundle.id):
        raise DamageError(
            f"{config.path}: `bundle.id` asks for {config.bundle.id}; {bundle_path} is another "
            f"bundle: {bundle.id}.",
            "Give the folder of the bundle that is asked for with --bundle. If this one is meant, "
            f"write its id: bundle: {{id: {bundle.id}}}",
        )
    try:
        return _resolve(config, bundle)
    except ClosedError:
        raise
    except UsageError:
        # A damaged bundle can look like a run file that does not fit. Damage is the first cause.
        check_known_damage(bundle_path, os.environ)
        check_names_and_sizes(bundle_path)
        raise


def _resolve(config: RunConfig, bundle: Bundle) -> Inputs:
    numbers = [None] if config.dataset is not None else range(len(config.sources))
    datasets = [
        _dataset(config, bundle, s, place_of(config.path, n))
        for s, n in zip(config.sources, numbers, strict=True)
    ]
    return Inputs(
        bundle=bundle.root.resolve(),
        bundle_id=bundle.id,
        model=_model(config, bundle),
        datasets=tuple(datasets),
        environment=environment_input(config, bundle),
        code=_code(config, bundle),
    )


def _code(config: RunConfig, bundle: Bundle) -> CodeInput | None:
    """Finds the code of a task of one's own; None: the task is one of Airlift's."""
    if config.code is None:
        return None
    asset = bundle.asset(config.code.asset)
    digests = {
        file.path.removeprefix(f"{asset.folder}/"): file.sha256 or ""
        for file in asset.files
        if file.path.endswith(".py")
    }
    folder = bundle.asset_path(asset.name).resolve()
    code = CodeInput(asset.name, folder, digests, config.task, config.code.allow)
    if code.file not in digests:
        modules = [name.removesuffix(".py").replace("/", ".") for name in digests]
        raise UsageError(
            f"{config.path}: `task: {config.task}`: the asset `{asset.name}` has no "
            f"{code.module.replace('.', '/')}.py.",
            suggest(code.module, modules, f"Its Python files: {', '.join(digests) or 'none'}."),
        )
    if sha256(_bytes(folder / code.file)).hexdigest() != digests[code.file]:
        raise DamageError(
            f"{folder / code.file}: damaged: its bytes are not those that were fetched.",
            remedy_for_damage(bundle.root),
        )
    return code


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
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


def environment_input(config: RunConfig, bundle: Bundle) -> EnvironmentInput | None:
    """Finds the environment that the run file names; None: it names none.

    Raises:
        UsageError: no such asset, or it is not an environment.
        DamageError: its env.json is damaged.
    """
    if config.environment is None:
        return None
    asset = bundle.asset(config.environment.asset)
    if asset.kind != "environment":
        raise UsageError(
            f"{config.path}: `environment.asset: {asset.name}` is a {asset.kind}, "
            "not an environment.",
            "`stage show BUNDLE` lists the assets with their kinds.",
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
        )
    except OSError as error:
        raise unreadable(folder / "env.json", error.strerror or str(error)) from None
    except (ValueError, KeyError, TypeError):
        raise DamageError(
            f"{folder / 'env.json'}: not what `stage fetch` wrote.", remedy_for_damage(bundle.root)
        ) from None


def verification(bundle: Path, environ: Mapping[str, str], *, pinned: bool = False) -> Verification:
    """Reports whether a bundle is verified. Calls `stat` once per payload file; reads none.

    Without a valid receipt it compares names and sizes, as `stage verify --fast` does.

    Args:
        pinned: the run file names the bundle by its id. Then a verification by block lists does not
            count if the id does not cover them (lock format 1).

    Raises:
        DamageError: a verification found damage, or names or sizes differ from the lock.
    """
    check_known_damage(bundle, environ)
    receipt = find_receipt(state_folder(environ), bundle)
    if isinstance(receipt, str):
        check_names_and_sizes(bundle)
        return Verification(False, f"{receipt}; names and sizes are right")
    text = f"{receipt.describe(time.time())}, unchanged since"
    if pinned and receipt.proof != BY_ID and not Bundle.open(bundle).lock.proves_blocks:
        return Verification(
            False, f"{text}, but by block lists that `bundle.id` does not cover (lock format 1)"
        )
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
        DamageError: they differ; names the damaged files and what to do.
    """
    report = verify(bundle, "fast")
    if not report.ok:
        raise _damage(bundle, report, "by its names and sizes", None)


def _damage(
    bundle: Path, report: VerificationReport, how: str, written: Path | None
) -> DamageError:
    named = [f"{finding.path} ({finding.problem})" for finding in report.findings[:FILES_NAMED]]
    if more := len(report.findings) - len(named):
        named.append(f"and {more} more")
    advice = [*suggest_fixes(report, written), f"Then: stage verify {bundle}"]
    return DamageError(f"{bundle}: damaged ({how}): {', '.join(named)}.", " ".join(advice))


def unreadable(path: Path, why: str) -> StageError:
    """The error of a file in a bundle that cannot be read: damage, or a right that is missing.

    Args:
        why: the message of the operating system or of the library.
    """
    if why == os.strerror(errno.EACCES):
        return ClosedError(
            f"{path}: you may not read it ({why}); it is not damaged.",
            f"`namei -l {path}` shows which right is missing; its owner can add it: chmod a+rX",
        )
    bundle = next((folder for folder in (path, *path.parents) if holds_bundle(folder)), path.parent)
    return DamageError(f"{path}: cannot be read: {why}.", remedy_for_damage(bundle))


def _model(config: RunConfig, bundle: Bundle) -> ModelInput:
    asset = bundle.asset(config.model.asset)
    folder = bundle.asset_path(asset.name).resolve()
    if asset.kind != "model" and not (asset.kind == "files" and (folder / "config.json").is_file()):
        what = f"is a {asset.kind}"
        if asset.kind == "files":
            what = "is plain files without a config.json"
        raise UsageError(
            f"{config.path}: `model.asset: {asset.name}` {what}, not a model.",
            "Name an asset that was staged with `model:`, or with `path:` from a folder that "
            "`save_pretrained` wrote.",
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
            f"Stage a model that has one: see `stage show {bundle.root}`.",
        )
    data = _bytes(path)
    if sha256(data).hexdigest() != digests[path.name]:
        raise DamageError(
            f"{path}: damaged: its bytes are not those that were fetched.",
            remedy_for_damage(bundle.root),
        )
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


def _dataset(
    config: RunConfig, bundle: Bundle, wanted: DatasetConfig, where: Callable[[str], str]
) -> DatasetInput:
    asset = bundle.asset(wanted.asset)
    if asset.kind != "dataset":
        raise UsageError(
            f"{where(f'asset: {asset.name}')} is a {asset.kind}, not a dataset.",
            "`stage show BUNDLE` lists the assets with their kinds.",
        )
    name, splits = _dataset_config(config, wanted, asset)

    def split(which: str) -> SplitInput:
        if which not in splits:
            raise UsageError(
                f"{config.path}: dataset `{asset.name}` ({name}) has no split `{which}` in this "
                "bundle.",
                suggest(which, splits, f"It has: {', '.join(splits)}."),
            )
        columns = {column.name: column.type for column in splits[which].schema}
        check_columns(config.task, wanted, columns, which, where)
        return _split(bundle, asset, which, splits[which], columns)

    validation = wanted.validation
    if validation == "auto":
        validation = "validation" if "validation" in splits else None
    train = split(wanted.train)
    if wanted.holds_out:
        train, held_out = _parts(wanted, train, where)
    else:
        held_out = split(validation) if validation else None
    return DatasetInput(
        asset=asset.name,
        config=name,
        train=train,
        validation=held_out,
        settings=wanted,
        source=asset.source.location,
        commit=asset.source.commit,
        licence=asset.licence,
    )


def _parts(
    wanted: DatasetConfig, split: SplitInput, where: Callable[[str], str]
) -> tuple[SplitInput, SplitInput | None]:
    """Divides a split into the rows to train on, and those that are held out."""
    share = str(wanted.validation)
    if split.rows < 2:
        raise UsageError(
            f"{where(f'validation: {share}')}: the split `{split.name}` has "
            f"{human_count(split.rows, 'row')}: nothing can be held out.",
            "Set validation: null, or another split (`stage show BUNDLE` lists them).",
        )
    parts = (Part(split.rows, share, wanted.validation_seed, held) for held in (False, True))
    kept, held_out = (replace(split, rows=part.rows, part=part) for part in parts)
    return kept, replace(held_out, name=f"{share} of {split.name}")


def _dataset_config(
    config: RunConfig, wanted: DatasetConfig, asset: LockedAsset
) -> tuple[str, Mapping[str, Any]]:
    have = ", ".join(asset.configs)
    if wanted.config == "auto":
        if len(asset.configs) != 1:
            raise UsageError(
                f"{config.path}: dataset `{asset.name}` has several configs.",
                f"Set dataset.config: {have}",
            )
        return next(iter(asset.configs.items()))
    if wanted.config not in asset.configs:
        raise UsageError(
            f"{config.path}: dataset `{asset.name}` has no config `{wanted.config}`.",
            suggest(wanted.config, asset.configs, f"It has: {have}"),
        )
    return wanted.config, asset.configs[wanted.config]


def _split(
    bundle: Bundle, asset: LockedAsset, name: str, locked: Any, columns: Mapping[str, str]
) -> SplitInput:
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
    """A repository of a bundle, as clients of the Hub see it.

    Attributes:
        kind: `models`, `datasets` or `spaces`.
        id: `org/name`, or an old name of it, or its name without an owner.
        refs: branch or tag -> commit.
        snapshots: commit -> path in the repository -> the file's path on this disk, or its bytes if
            it was generated.
    """

    kind: str
    id: str
    refs: Mapping[str, str]
    snapshots: Mapping[str, Mapping[str, Path | bytes]]


def hub_repositories(bundle_path: Path) -> tuple[str, list[HubRepository]]:
    """A bundle's id, and its models and datasets under each name that clients may use.

    Raises:
        UsageError: not a complete bundle.
        DamageError: the bundle's lock is damaged.
    """
    bundle = Bundle.open(bundle_path.resolve())
    found = Catalogue.of(bundle).names
    return bundle.id, [
        _hub_repository(kind, name, served) for (kind, name), served in found.items()
    ]


def _hub_repository(kind: str, name: str, served: ServedRepository) -> HubRepository:
    refs = {DEFAULT_REVISION: served.versions[0].commit}
    for version in reversed(served.versions):
        refs |= {ref: version.commit for ref in version.revisions if ref != version.commit}
    snapshots = {
        v.commit: {path: file.content for path, file in v.files.items()} for v in served.versions
    }
    return HubRepository(kind, name, refs, snapshots)


def environments(bundle: Path) -> list[Path]:
    """The folders of the environments in a bundle."""
    opened = Bundle.open(bundle)
    assets = opened.lock.assets.values()
    return [opened.asset_path(a.name) for a in assets if a.kind == "environment"]


def running_tree(prefix: Path = Path(sys.prefix)) -> str | None:
    """The tree digest of the environment at `prefix`; None: it is not from a bundle."""
    description = prefix / ".airlift" / "env.json"
    try:
        return str(json.loads(description.read_text(encoding="utf-8"))["tree"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
