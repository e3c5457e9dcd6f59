"""From the manifest to the lock: resolves each request, or keeps what an earlier lock pinned.

A lock answers a manifest asset by asset. An entry that is still written the same way keeps its pin,
a new or changed entry is resolved again, and a removed one is dropped. So a new dataset never moves
the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from stage.errors import PolicyError, UsageError, suggest
from stage.files import human_count, human_size, read_file
from stage.hub.model_files import PICKLE_SUFFIXES
from stage.lock.licences import not_allowed, states_nothing
from stage.lock.manifest import Manifest
from stage.lock.model import FOLDERS, LockedAsset
from stage.lock.read import read_lock
from stage.lock.requests import Request, as_lock_request, way_without
from stage.lock.write import Lockfile
from stage.paths import check_collisions, printable
from stage.progress import Reporter
from stage.staging.prechecks import check_bases, check_sizes, omitted_files
from stage.staging.sources.listing import Listing
from stage.staging.sources.source import Sources

ALL = "*"


@dataclass(frozen=True)
class Resolution:
    """A manifest, the lock that answers it, and the names of assets that were resolved again."""

    manifest: Manifest
    lock: Lockfile
    changed: tuple[str, ...]

    @property
    def lock_path(self) -> Path:
        """The path of the lock, beside the manifest."""
        return self.manifest.lock_path


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


def stale_assets(manifest: Manifest, lock: Lockfile | None) -> list[str]:
    """Names of assets that a lock does not answer, and of those that the manifest dropped."""
    have = lock.assets if lock else {}
    wanted = {name: as_lock_request(request) for name, request in manifest.requests.items()}
    changed = [
        name
        for name, request in wanted.items()
        if name not in have or dict(have[name].request) != request
    ]
    return changed + [name for name in have if name not in wanted]


def look_at_local(
    manifest: Manifest, previous: Lockfile | None, sources: Sources, updates: Iterable[str]
) -> Mapping[str, Listing]:
    """Lists the files beside the manifest, before anything is hashed or requested.

    Raises:
        StageError: files are missing or must not travel; all such mistakes in one error.
    """
    updates = set(updates)
    made_again = (
        set(manifest.requests)
        if ALL in updates
        else updates | set(stale_assets(manifest, previous))
    )
    return sources.look_at_local(manifest, made_again)


def resolve(
    manifest: Manifest,
    previous: Lockfile | None,
    sources: Sources,
    reporter: Reporter,
    *,
    updates: Iterable[str] = (),
    locked: bool = False,
) -> Resolution:
    """Makes the lock that answers a manifest.

    Args:
        previous: pins to keep where they still answer.
        updates: assets to resolve again, whatever the lock says; `*`: all.
        locked: refuse to move or add any pin.

    Raises:
        UsageError: `locked` and the lock does not answer; an unknown asset in `updates`; a source
            refuses.
        PolicyError: a licence that the manifest's policy does not allow; a source refuses.
    """
    updates = set(updates)
    _check_updates(manifest, updates, locked)
    stale = set(stale_assets(manifest, previous))
    if locked:
        _check_answered(manifest, previous, stale)
    assets: dict[str, LockedAsset] = {}
    changed: list[str] = []
    for name, request in manifest.requests.items():
        if previous and name not in stale and not updates & {name, ALL}:
            assets[name] = previous.assets[name]
            sources.check_unchanged(assets[name], request, manifest)
            reporter.detail(f"{name}: pinned by {manifest.lock_path.name}")
        else:
            assets[name] = _with_stated_licence(
                sources.resolve(name, request, manifest), request, manifest
            )
            changed.append(name)
            _print_asset(assets[name], reporter)
            for missing in omitted_files(assets[name]).notes:
                where = f"{manifest.place(name)}: `{name}`"
                reporter.note(f"note: {where}: `include` leaves out {missing}")
    check_bases(manifest, assets)
    check_sizes(manifest, assets)
    _check_one_commit_per_revision(manifest, assets)
    lock = Lockfile(manifest.name, assets)
    if previous is not None:
        lock = _keep_known_digests(lock, previous)
    check_names(lock, manifest)
    _check_licences(manifest, lock)
    _check_allowed(manifest, lock)
    return Resolution(manifest, lock, tuple(changed))


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
        if source.type == "hub" and other.source.commit != source.commit:
            raise UsageError(
                f"{manifest.place(asset.name)}: `{other.name}` and `{asset.name}` are "
                f"{source.location} at `{source.requested_revision}`, and "
                f"{manifest.lock_path.name} has two commits of it.",
                manifest.update_command(other.name) + f" --update {asset.name}",
            )


def _check_answered(manifest: Manifest, previous: Lockfile | None, stale: set[str]) -> None:
    """Raises for `--locked` where the lock does not answer the manifest.

    Raises:
        UsageError: names the assets.
    """
    problem = "is not there"
    if previous is not None:
        if not stale:
            return
        problem = f"does not answer it: {', '.join(sorted(stale))}"
    raise UsageError(
        f"{manifest.path}: --locked, but {manifest.lock_path.name} {problem}.",
        f"stage lock {manifest.path}",
    )


def check_names(lock: Lockfile, manifest: Manifest) -> None:
    """Checks that no two files would be one file on some disk, asset by asset.

    Raises:
        PolicyError: naming two of them.
    """
    for asset in lock.assets.values():
        what = f"{manifest.place(asset.name)}: `{asset.name}`"
        check_collisions([file.path for file in asset.files], what, way_without(asset.request))
    check_collisions([asset.folder for asset in lock.assets.values()], str(manifest.path))


def loads_by_name(manifest: Manifest, lock: Lockfile) -> UsageError | None:
    """The error for patterns that omit files which weights need to load; None if none do."""
    omitted = [
        (name, found.needed)
        for name, asset in lock.assets.items()
        if (found := omitted_files(asset)).needed
    ]
    if not omitted:
        return None
    mistakes = "; ".join(
        f"{manifest.place(name)}: `{name}`: its weights will not load without "
        f"{', '.join(files[:4])}{', ...' * (len(files) > 4)}, which its patterns leave out"
        for name, files in omitted
    )
    files = ", ".join(f'"{file}"' for file in omitted[0][1][:4])
    return UsageError(
        f"{mistakes}.",
        f"Add to `include` (or remove from `exclude`): {files}. "
        "To fetch it as it is: --no-offline-check",
    )


def _print_asset(asset: LockedAsset, reporter: Reporter) -> None:
    reporter.note(describe(asset))
    for code in asset.code:
        names = ", ".join(path.removeprefix(f"{asset.folder}/") for path in code.files)
        reporter.note(
            f"{asset.name}: with code, as the manifest allows: {names} of "
            f"{code.repository}@{code.commit[:12]}"
        )
    for left in asset.left_out:
        reporter.detail(f"  left out {left.path} ({human_size(left.size)}): {left.reason}")


def describe(asset: LockedAsset) -> str:
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


def _check_updates(manifest: Manifest, updates: set[str], locked: bool) -> None:
    if locked and updates:
        raise UsageError("--locked and --update contradict each other.", "Leave one of them out.")
    for name in updates - {ALL}:
        if name not in manifest.requests:
            raise UsageError(
                f"--update {name}: {manifest.path} has no such asset.",
                suggest(name, manifest.requests, f"It has: {', '.join(manifest.requests)}."),
            )


def _keep_known_digests(lock: Lockfile, previous: Lockfile) -> Lockfile:
    """An asset that is resolved again to the same files keeps its completed entry."""
    for name, asset in lock.assets.items():
        old = previous.assets.get(name)
        if old is not None and old is not asset and _same_but_for_digests(asset, old):
            lock = lock.with_asset(old)
    return lock


def _same_but_for_digests(new: LockedAsset, old: LockedAsset) -> bool:
    if (new.source, dict(new.request), new.licence, new.left_out) != (
        old.source,
        dict(old.request),
        old.licence,
        old.left_out,
    ):
        return False
    return new.source.type == "hub" and _as_published(new) == _as_published(old)


def _as_published(asset: LockedAsset) -> tuple[object, ...]:
    """What resolving alone shows: no digests of small files, no files that are made of others."""
    splits = {
        (c, s, split.declared_rows)
        for c, splits in asset.configs.items()
        for s, split in splits.items()
    }
    return (
        sorted((f.path, f.size, str(f.upstream), f.origin) for f in asset.files if not f.made_by),
        sorted((i.origin, i.size or 0, str(i.upstream), str(i.part)) for i in asset.made_from),
        sorted(splits, key=str),
        (asset.aliases, asset.base, asset.code),
    )


def _with_stated_licence(asset: LockedAsset, request: Request, manifest: Manifest) -> LockedAsset:
    """The asset with the licence that the manifest states, where its repository states none.

    Raises:
        UsageError: the repository states another.
    """
    licence = getattr(request, "licence", None)
    if licence is None:
        return asset
    if not states_nothing(asset.licence) and asset.licence != licence:
        raise UsageError(
            f"{manifest.place(asset.name, 'licence')}: `{asset.name}`: {asset.source.location} "
            f"states the licence {asset.licence}, not {licence}.",
            "`licence:` is for repositories that state none: remove it.",
        )
    return replace(asset, licence=licence)


def _check_licences(manifest: Manifest, lock: Lockfile) -> None:
    if manifest.licences is None:
        return
    refused = [
        (asset.name, f"{whose}{', '.join(names)}{' (none is stated)' if licence is None else ''}")
        for asset in lock.assets.values()
        for whose, licence in _statements(asset).items()
        if (names := not_allowed(licence, manifest.licences))
    ]
    if not refused:
        return
    listed = "; ".join(f"{manifest.place(name)}: `{name}`: {which}" for name, which in refused)
    raise PolicyError(
        f"Licences that the policy does not allow: {listed}. "
        f"It allows {', '.join(manifest.licences)}.",
        "Take another repository; or, after reading the licence, add it to "
        "`policy: {licences: [...]}`. If the repository states none, write the licence that you "
        "know: `licence: mit` in its entry.",
    )


def _statements(asset: LockedAsset) -> dict[str, str | None]:
    """The stated licences: of the asset (key `""`), and of code from other repositories."""
    others = {
        f"code of {c.repository}: ": c.licence
        for c in asset.code
        if c.repository != asset.source.location
    }
    return {"": asset.licence, **others}


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
                    f"Resolve it again: stage lock {manifest.path} --update {asset.name}",
                )
