"""Base models of adapters: models that a lock holds although the manifest does not name them.

The asset of an adapter says which base it needs. If the manifest asks for that repository, its
asset is used. Otherwise an asset is added: named after the repository, marked with its adapters
(`base_of`), and pinned like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace

from stage.lock.model import Base, LockedAsset
from stage.lock.write import Lockfile
from stage.manifest.requests import ModelRequest, as_lock_request
from stage.util.paths import folded, problem_with_asset_name

ALL = "*"

# (asset name, request, the adapter it is for) -> the asset
Resolver = Callable[[str, ModelRequest, LockedAsset], LockedAsset]


def server_of(base: Base, assets: Iterable[LockedAsset]) -> LockedAsset | None:
    """The model among these that is an adapter's base, at any revision."""
    return next((a for a in assets if a.kind == "model" and base.repository in a.names), None)


def unanswered_bases(lock: Lockfile, wanted: Collection[str]) -> list[str]:
    """Adapters whose base is missing in the lock, and bases that no adapter needs any more.

    Args:
        wanted: the names of the manifest's assets.
    """
    assets = lock.assets.values()
    missing = [
        a.name
        for a in assets
        if a.base and _is_wanted(a, wanted) and server_of(a.base, assets) is None
    ]
    return missing + [a.name for a in assets if a.base_of and not _is_needed(a, lock)]


def _is_wanted(asset: LockedAsset, wanted: Collection[str]) -> bool:
    return asset.name in wanted or bool(asset.base_of)


def _is_needed(asset: LockedAsset, lock: Lockfile) -> bool:
    adapters = [lock.assets.get(name) for name in asset.base_of]
    return any(
        a is not None and a.base is not None and a.base.repository in asset.names for a in adapters
    )


def bases_of(
    assets: Mapping[str, LockedAsset],
    previous: Lockfile | None,
    updates: Collection[str],
    resolve: Resolver,
    note: Callable[[str], None],
) -> dict[str, LockedAsset]:
    """The base models to add for the adapters among `assets`.

    Args:
        assets: the resolved assets of the manifest.
        previous: pins to keep.
        updates: assets whose pins move.
        resolve: resolves a base model.
        note: called with a line about each base: why it is added, or not.

    Returns:
        By name, each with its `base_of`; and those of `assets` that are a base under another name,
        with that name among their aliases.

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
        # A repository may have moved: only now its present name is known, and may be here already.
        asset = next(
            (a for a in (*asked_for, *found.values()) if _is_same(a, asset, base, assets)), asset
        )
        if base.repository not in asset.names:
            asset = replace(asset, aliases=tuple(sorted({*asset.aliases, base.repository})))
            found.update({asset.name: asset} if asset.name in assets else {})
        if asset.name in assets:
            other = f", at {asset.source.requested_revision}" * (
                asset.source.requested_revision != base.revision
            )
            note(
                f"{adapter.name}: its base model {base.repository} is `{asset.name}` "
                f"of the manifest{other}"
            )
            continue
        is_new = asset.name not in found
        if is_new:
            note(
                f"{asset.name}: added because `{adapter.name}` is an adapter of it "
                "(`base: false` there omits it)"
            )
        found[asset.name] = _for(asset, adapter.name, is_new)
        if is_new and asset.base:
            waiting.append(found[asset.name])
    return found


def _is_same(
    one: LockedAsset, other: LockedAsset, base: Base, assets: Mapping[str, LockedAsset]
) -> bool:
    """Whether both are the same model. A model of the manifest serves at any revision."""
    if one.kind != "model" or one.source.location != other.source.location:
        return False
    return one.name in assets or one.source.requested_revision == base.revision


def _request(base: Base, adapter: LockedAsset) -> ModelRequest:
    """The request for the base, as in a manifest. It allows code if the adapter's entry does."""
    allow_code = bool(adapter.request.get("allow_code"))
    return ModelRequest(repository=base.repository, revision=base.revision, allow_code=allow_code)


def _brought(base: Base, found: Iterable[LockedAsset]) -> LockedAsset | None:
    fitting = (
        a
        for a in found
        if a.base_of and base.repository in a.names and a.source.requested_revision == base.revision
    )
    return next(fitting, None)


def _kept(
    request: ModelRequest,
    previous: Lockfile | None,
    taken: Collection[str],
    updates: Collection[str],
) -> LockedAsset | None:
    """The asset that an earlier lock pinned for the same base, if its name is still free."""
    wanted = as_lock_request(request)
    for asset in previous.assets.values() if previous else ():
        if asset.base_of and dict(asset.request) == wanted and not {asset.name, ALL} & set(updates):
            return None if folded(asset.name) in {folded(name) for name in taken} else asset
    return None


def _for(asset: LockedAsset, adapter: str, is_new: bool) -> LockedAsset:
    others = () if is_new else asset.base_of
    return replace(asset, base_of=tuple(sorted({*others, adapter})))


def _free_name(base: Base, adapter: LockedAsset, taken: Iterable[str]) -> str:
    """The repository's name; if taken, with its owner's name, or a name after the adapter."""
    used = {folded(name) for name in taken}
    own = base.repository.rpartition("/")[2]
    names = (
        own,
        base.repository.replace("/", "-"),
        *(f"{adapter.name}-base{n}" for n in ("", *range(2, 100))),
    )
    return next(n for n in names if folded(n) not in used and problem_with_asset_name(n) is None)
