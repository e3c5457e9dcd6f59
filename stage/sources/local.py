"""Local files: a file or folder beside the manifest becomes an asset of files, or what a dataset is converted from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from stage.asset import Ingredient, LockedAsset, LockedFile, Source
from stage.digest import FileDigests, hash_file
from stage.errors import UsageError
from stage.manifest import Manifest
from stage.names import check_path
from stage.request import PathRequest, as_lock_request, way_without
from stage.sources.listing import Listing, local_base
from stage.sources.partial import copy_hashed


def resolve_path(name: str, request: PathRequest, listing: Listing, manifest: Manifest) -> LockedAsset:
    """Hashes what a `path:` entry takes.

    Raises:
        PolicyError: a name that may not be in a bundle.
        OSError: a file cannot be read.
    """
    asset = LockedAsset(
        name=name,
        kind="files",
        request=as_lock_request(request),
        source=Source("path", request.path),
        files=(),
    )
    files = []
    for path in listing.sizes:
        check_path(f"{asset.folder}/{path}", f"{manifest.place(name, 'path')}: `{name}`", way_without(asset.request))
        digests = hash_file(listing.file(path))
        files.append(LockedFile(f"{asset.folder}/{path}", digests.size, digests.sha256, None, path))
    if request.convert:
        made_from = tuple(Ingredient(file.origin, file.size, file.sha256) for file in files)
        return replace(asset, kind="dataset", made_from=made_from, left_out=listing.left_out)
    return replace(asset, files=tuple(files), left_out=listing.left_out)


def local_file(asset: LockedAsset, origin: str, manifest: Manifest) -> Path:
    """Where a locked file of a `path:` asset lies on this machine."""
    check_path(origin, f"{manifest.lock_path}: `{asset.name}`")  # a lock may come from somebody else
    base = local_base(asset.source.location, manifest)
    return base if base.is_file() else base / origin


def unchanged(
    asset: LockedAsset, ingredient: Ingredient, manifest: Manifest, progress: Callable[[int], None]
) -> tuple[Path, FileDigests]:
    """A local file that others are made of, still as it was locked.

    Raises:
        UsageError: it is gone or changed.
    """
    path = local_file(asset, ingredient.origin, manifest)
    digests = hash_file(path, progress=progress) if path.is_file() else None
    return path, _as_locked(path, digests, ingredient.sha256, take_as_it_is(asset, manifest))


def bring_local(
    source: Path, file: LockedFile, target: Path, progress: Callable[[int], None], remedy: str
) -> FileDigests:
    """Copies a file of this machine into place, if it is still the one that was locked.

    Args:
        remedy: what to do where it is not.

    Raises:
        UsageError: it is gone or changed; nothing is left at `target`.
    """
    digests = copy_hashed(source, target, file.size, progress) if source.is_file() else None
    try:
        return _as_locked(source, digests, file.sha256, remedy)
    except UsageError:
        target.unlink(missing_ok=True)
        raise


def take_as_it_is(asset: LockedAsset, manifest: Manifest) -> str:
    """The remedy for local files that are not the ones locked."""
    return f"To take it as it is now: stage fetch {manifest.path} --update {asset.name} -o ..."


def _as_locked(path: Path, digests: FileDigests | None, sha256: str | None, remedy: str) -> FileDigests:
    if digests is None or digests.sha256 != sha256:
        raise UsageError(f"{path}: {'changed' if digests else 'gone'} since it was locked.", remedy)
    return digests
