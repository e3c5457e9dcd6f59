"""Adapters bring their base: which models a lock holds besides those the manifest names, and why.

An adapter's asset says which base it needs. If the manifest asks for that repository, that asset serves; else one is
added, named after the repository, marked with the adapters it is for (`base_of`), and pinned like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace

from stage.asset import Base, LockedAsset
from stage.lockfile import Lockfile
from stage.names import folded, problem_with_asset_name
from stage.request import ModelRequest, as_lock_request

ALL = "*"

# (asset name, request, the adapter it is for) -> the asset
Resolver = Callable[[str, ModelRequest, LockedAsset], LockedAsset]


def server_of(base: Base, assets: Iterable[LockedAsset]) -> LockedAsset | None:
    """The model among these that is an adapter's base, whatever its revision."""
    return next((a for a in assets if a.kind == "model" and base.repository in a.names), None)


def unanswered_bases(lock: Lockfile, wanted: Collection[str]) -> list[str]:
    """Adapters of the manifest whose base the lock lacks, and bases in the lock that none of them needs any more.

    Args:
        wanted: the names of the manifest's assets.
    """
    assets = lock.assets.values()
    lacking = [a.name for a in assets if a.base and _is_wanted(a, wanted) and server_of(a.base, assets) is None]
    return lacking + [a.name for a in assets if a.base_of and not _is_needed(a, lock)]


def _is_wanted(asset: LockedAsset, wanted: Collection[str]) -> bool:
    return asset.name in wanted or bool(asset.base_of)


def _is_needed(asset: LockedAsset, lock: Lockfile) -> bool:
    adapters = [lock.assets.get(name) for name in asset.base_of]
    return any(a is not None and a.base is not None and a.base.repository in asset.names for a in adapters)


def bases_of(
    assets: Mapping[str, LockedAsset],
    previous: Lockfile | None,
    updates: Collection[str],
    resolve: Resolver,
    tell: Callable[[str], None],
) -> dict[str, LockedAsset]:
    """The models to bring for the adapters among `assets`, by name, each with its `base_of`; and of `assets` those
    that turn out to be a base under another name, with that name among their aliases.

    Args:
        assets: what the manifest names, resolved.
        previous: pins to keep.
        updates: assets whose pins move.
        resolve: finds out what a base is today.
        tell: hears why each is brought, or not.

    Raises:
        StageError: what resolving refuses, with the adapter's name and the way to do without.
    """
    found: dict[str, LockedAsset] = {}
    waiting = [asset for asset in assets.values() if asset.base]
    while waiting:
        adapter = waiting.pop(0)
        assert adapter.base is not None
        base, request = adapter.base, _request(adapter.base, adapter)
        asked_for = [found.get(name, asset) for name, asset in assets.items()]
        asset = server_of(base, asked_for) or _brought(base, found.values())
        asset = asset or _kept(request, previous, {*assets, *found}, updates)
        if asset is None:
            asset = resolve(_free_name(base, adapter, {*assets, *found}), request, adapter)
        # Only now it is known what a repository that moved is called today: it may be here under another name.
        asset = next((a for a in (*asked_for, *found.values()) if _is_same(a, asset, base, assets)), asset)
        if base.repository not in asset.names:
            asset = replace(asset, aliases=tuple(sorted({*asset.aliases, base.repository})))
            found.update({asset.name: asset} if asset.name in assets else {})
        if asset.name in assets:
            other = f", at {asset.source.requested_revision}" * (asset.source.requested_revision != base.revision)
            tell(f"{adapter.name}: its base model {base.repository} is `{asset.name}` of the manifest{other}")
            continue
        is_new = asset.name not in found
        if is_new:
            tell(f"{asset.name}: brought because `{adapter.name}` is an adapter of it (`base: false` there leaves it)")
        found[asset.name] = _for(asset, adapter.name, is_new)
        if is_new and asset.base:
            waiting.append(found[asset.name])
    return found


def _is_same(one: LockedAsset, other: LockedAsset, base: Base, assets: Mapping[str, LockedAsset]) -> bool:
    """Whether `one`, which is here, is the model that `other` is. What the manifest asks for serves at any revision."""
    if one.kind != "model" or one.source.location != other.source.location:
        return False
    return one.name in assets or one.source.requested_revision == base.revision


def _request(base: Base, adapter: LockedAsset) -> ModelRequest:
    """What a person would write for the base. Code that is allowed for the adapter is allowed for its base."""
    allow_code = bool(adapter.request.get("allow_code"))
    return ModelRequest(repository=base.repository, revision=base.revision, allow_code=allow_code)


def _brought(base: Base, found: Iterable[LockedAsset]) -> LockedAsset | None:
    fitting = (
        a for a in found if a.base_of and base.repository in a.names and a.source.requested_revision == base.revision
    )
    return next(fitting, None)


def _kept(
    request: ModelRequest, previous: Lockfile | None, taken: Collection[str], updates: Collection[str]
) -> LockedAsset | None:
    """What an earlier lock pinned for the same need, if its name is still free."""
    wanted = as_lock_request(request)
    for asset in previous.assets.values() if previous else ():
        if asset.base_of and dict(asset.request) == wanted and not {asset.name, ALL} & set(updates):
            return None if folded(asset.name) in {folded(name) for name in taken} else asset
    return None


def _for(asset: LockedAsset, adapter: str, is_new: bool) -> LockedAsset:
    others = () if is_new else asset.base_of
    return replace(asset, base_of=tuple(sorted({*others, adapter})))


def _free_name(base: Base, adapter: LockedAsset, taken: Iterable[str]) -> str:
    """The repository's own name; with its owner's before it, or after the adapter, where that is taken."""
    used = {folded(name) for name in taken}
    own = base.repository.rpartition("/")[2]
    names = (own, base.repository.replace("/", "-"), *(f"{adapter.name}-base{n}" for n in ("", *range(2, 100))))
    return next(n for n in names if folded(n) not in used and problem_with_asset_name(n) is None)
