"""Manifest -> lock: finds out what each request means today, or keeps what an earlier lock pinned.

A lock answers a manifest asset by asset: an entry that is still written the same way keeps its pin, a new or changed
one is resolved anew, a removed one is dropped. So adding a dataset never moves the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from stage.asset import LockedAsset
from stage.bases import ALL, bases_of, unanswered_bases
from stage.disk import human_count, human_size, read_file
from stage.errors import PolicyError, UsageError
from stage.lacking import lacking
from stage.licences import not_allowed, states_nothing
from stage.lockfile import Lockfile
from stage.lockreader import read_lock
from stage.manifest import Manifest
from stage.names import check_collisions, printable
from stage.progress import Reporter
from stage.request import ModelRequest, Request, as_lock_request, way_without
from stage.sources import Sources
from stage.sources.listing import Listing
from stage.sources.selection import PICKLE_SUFFIXES


@dataclass(frozen=True)
class Resolution:
    """A manifest with the lock that answers it, and which assets were resolved anew for it."""

    manifest: Manifest
    lock: Lockfile
    changed: tuple[str, ...]

    @property
    def lock_path(self) -> Path:
        """Where the lock belongs: beside the manifest."""
        return self.manifest.lock_path


def read_previous(manifest: Manifest) -> Lockfile | None:
    """The lock beside a manifest, if there is one.

    Raises:
        UsageError: it is there and cannot be read.
    """
    path = manifest.lock_path
    try:
        return read_lock(read_file(path), str(path))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}.", "Move it away, or make it readable.") from None


def stale_assets(manifest: Manifest, lock: Lockfile | None) -> list[str]:
    """The assets that a lock does not answer as the manifest asks now, and those it has too many."""
    have = lock.assets if lock else {}
    wanted = {name: as_lock_request(request) for name, request in manifest.requests.items()}
    changed = [name for name, request in wanted.items() if name not in have or dict(have[name].request) != request]
    return changed + [name for name in have if name not in wanted and not have[name].base_of]


def look_at_local(
    manifest: Manifest, previous: Lockfile | None, sources: Sources, updates: Iterable[str]
) -> Mapping[str, Listing]:
    """Looks at the files beside the manifest before anything is hashed or asked for: all their mistakes at once.

    Raises:
        StageError: something is not there, or may not travel.
    """
    updates = set(updates)
    anew = set(manifest.requests) if ALL in updates else updates | set(stale_assets(manifest, previous))
    return sources.look_at_local(manifest, anew)


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
        updates: assets to resolve anew whatever the lock says; `*`: all.
        locked: refuse to move or add any pin.

    Raises:
        UsageError: `locked` and the lock does not answer; an unknown asset in `updates`; what the sources refuse.
        PolicyError: a licence the manifest's policy does not allow; what the sources refuse.
    """
    updates = set(updates)
    _check_updates(manifest, previous, updates, locked)
    stale = set(stale_assets(manifest, previous))
    unanswered = sorted(stale | set(unanswered_bases(previous, manifest.requests))) if previous else []
    if locked and (previous is None or unanswered):
        problem = f"does not answer it: {', '.join(unanswered)}" if previous else "is not there"
        raise UsageError(
            f"{manifest.path}: --locked, but {manifest.lock_path.name} {problem}.", f"stage lock {manifest.path}"
        )
    assets: dict[str, LockedAsset] = {}
    changed: list[str] = []
    for name, request in manifest.requests.items():
        if previous and name not in stale and not updates & {name, ALL}:
            assets[name] = previous.assets[name]
            sources.check_unchanged(assets[name], request, manifest)
            reporter.detail(f"{name}: pinned by {manifest.lock_path.name}")
        else:
            assets[name] = _with_stated_licence(sources.resolve(name, request, manifest), request, manifest)
            changed.append(name)
            _tell(assets[name], reporter)
            for missing in lacking(assets[name]).notes:
                reporter.note(f"{manifest.place(name)}: `{name}`: `include` leaves out {missing}")

    def resolve_base(name: str, request: ModelRequest, adapter: LockedAsset) -> LockedAsset:
        what = f"{manifest.place(adapter.name)}: `{adapter.name}`: its base model"
        try:
            asset = sources.resolve(name, request, manifest, what)
        except (UsageError, PolicyError) as error:
            raise type(error)(error.message, f"{error.remedy} Or do without the base model: `base: false`.") from None
        resolved.add(name)
        return asset

    resolved: set[str] = set()
    bases = bases_of(assets, previous, updates, resolve_base, reporter.note)
    assets |= bases
    for name in sorted(resolved & bases.keys()):
        changed.append(name)
        _tell(assets[name], reporter)
    lock = Lockfile(manifest.name, assets)
    if previous:
        lock = _keep_known_digests(lock, previous)
    check_names(lock, manifest)
    _check_licences(manifest, lock)
    _check_leave(manifest, lock)
    return Resolution(manifest, lock, tuple(changed))


def check_names(lock: Lockfile, manifest: Manifest) -> None:
    """Refuses files that would be one on some disk, asset by asset: how to do without one depends on its entry.

    Raises:
        PolicyError: naming two of them.
    """
    for asset in lock.assets.values():
        what = f"{manifest.place(asset.name)}: `{asset.name}`"
        check_collisions([file.path for file in asset.files], what, way_without(asset.request))
    check_collisions([asset.folder for asset in lock.assets.values()], str(manifest.path))


def loads_by_name(manifest: Manifest, lock: Lockfile) -> UsageError | None:
    """What to say of patterns that leave out what weights do not load without; None if there are none such."""
    told = [(name, found.needed) for name, asset in lock.assets.items() if (found := lacking(asset)).needed]
    if not told:
        return None
    mistakes = "; ".join(
        f"{manifest.place(name)}: `{name}`: its weights will not load without {', '.join(files[:4])}"
        f"{', ...' * (len(files) > 4)}, which its patterns leave out"
        for name, files in told
    )
    files = ", ".join(f'"{file}"' for file in told[0][1][:4])
    return UsageError(
        f"{mistakes}.",
        f"Add to `include` (or take out of `exclude`): {files}. To fetch it as it is: --no-offline-check",
    )


def _tell(asset: LockedAsset, reporter: Reporter) -> None:
    reporter.note(describe(asset))
    for code in asset.code:
        names = ", ".join(path.removeprefix(f"{asset.folder}/") for path in code.files)
        reporter.note(
            f"{asset.name}: with code, as the manifest allows: {names} of {code.repository}@{code.commit[:12]}"
        )
    for left in asset.left_out:
        reporter.detail(f"  left out {left.path} ({human_size(left.size)}): {left.reason}")


def describe(asset: LockedAsset) -> str:
    """One line on what an asset turned out to be."""
    source = asset.source
    where = f"{source.location}@{source.commit[:12]}" if source.commit else source.location
    revision = f" ({source.requested_revision})" if source.requested_revision not in (None, source.commit) else ""
    left = f", {len(asset.left_out)} left out" if asset.left_out else ""
    files = f"{human_count(len(asset.files), 'file')}, {human_size(asset.size)}"
    if asset.made_from and not any(file.made_by for file in asset.files):
        size = human_size(sum(i.size or 0 for i in asset.made_from))
        made = f"to be made from {human_count(len(asset.made_from), 'file')}, {size}"
        files = f"{files}, and more {made}" if asset.files else made
    return f"{asset.name}: {asset.kind} {where}{revision}: {files}{left}"


def _check_updates(manifest: Manifest, previous: Lockfile | None, updates: set[str], locked: bool) -> None:
    if locked and updates:
        raise UsageError("--locked and --update contradict each other.", "Leave one of them out.")
    bases = {name for name, asset in previous.assets.items() if asset.base_of} if previous else set()
    for name in updates - {ALL} - bases:
        if name not in manifest.requests:
            raise UsageError(
                f"--update {name}: {manifest.path} has no such asset.", f"It has: {', '.join(manifest.requests)}."
            )


def _keep_known_digests(lock: Lockfile, previous: Lockfile) -> Lockfile:
    """A re-resolved asset that turns out to be the very same keeps its completed entry."""
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
    """What resolving alone knows of an asset: not the digests of small files, nor what is made of others."""
    splits = {(c, s, split.declared_rows) for c, splits in asset.configs.items() for s, split in splits.items()}
    return (
        sorted((f.path, f.size, str(f.upstream), f.origin) for f in asset.files if not f.made_by),
        sorted((i.origin, i.size or 0, str(i.upstream), str(i.part)) for i in asset.made_from),
        sorted(splits, key=str),
        (asset.aliases, asset.base, asset.base_of, asset.code),
    )


def _with_stated_licence(asset: LockedAsset, request: Request, manifest: Manifest) -> LockedAsset:
    """The asset with the licence that the manifest states, where nobody else states one.

    Raises:
        UsageError: the repository states another.
    """
    licence = getattr(request, "licence", None)
    if licence is None:
        return asset
    if not states_nothing(asset.licence) and asset.licence != licence:
        raise UsageError(
            f"{manifest.place(asset.name, 'licence')}: `{asset.name}`: {asset.source.location} states the licence "
            f"{asset.licence}, not {licence}.",
            "`licence:` is for what states none: take it out.",
        )
    return replace(asset, licence=licence)


def _check_licences(manifest: Manifest, lock: Lockfile) -> None:
    if manifest.licences is None:
        return
    refused = [
        (asset.name, f"{whose}{', '.join(words)}{' (none is stated)' if licence is None else ''}")
        for asset in lock.assets.values()
        for whose, licence in _statements(asset).items()
        if (words := not_allowed(licence, manifest.licences))
    ]
    if not refused:
        return
    told = "; ".join(f"{manifest.place(name)}: `{name}`: {words}" for name, words in refused)
    raise PolicyError(
        f"Licences that the policy does not allow: {told}. It allows {', '.join(manifest.licences)}.",
        "Take another repository; or, after reading the licence, add it to `policy: {licences: [...]}`. Of what states "
        "none, write what you know: `licence: mit` in its entry.",
    )


def _statements(asset: LockedAsset) -> dict[str, str | None]:
    """Whose licence -> what it states: the asset's, and that of code it takes from other repositories."""
    others = {f"code of {c.repository}: ": c.licence for c in asset.code if c.repository != asset.source.location}
    return {"": asset.licence, **others}


def _check_leave(manifest: Manifest, lock: Lockfile) -> None:
    """Whatever an earlier lock says: no code without the manifest's leave, and no pickles."""
    for asset in lock.assets.values():
        if asset.kind not in ("model", "tokenizer"):
            continue
        for file in asset.files:
            name = file.path.lower()
            if name.endswith(PICKLE_SUFFIXES) or (name.endswith(".py") and not asset.request.get("allow_code")):
                raise PolicyError(
                    f"{manifest.place(asset.name)}: `{asset.name}`: {manifest.lock_path.name} lists "
                    f"{printable(file.path)}, which this manifest does not let in.",
                    f"Resolve it anew: stage lock {manifest.path} --update {asset.name}",
                )
