"""Local files: a file or folder beside the manifest becomes an asset of files or a dataset."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from stage.digests import FileDigests, hash_file
from stage.download.partial_file import copy_hashed
from stage.errors import UsageError
from stage.lock.manifest import Manifest
from stage.lock.model import Ingredient, LockedAsset, LockedFile, Source
from stage.lock.requests import PathRequest, as_lock_request, way_without
from stage.paths import check_path, check_paths
from stage.staging.sources.listing import Listing, local_base


def resolve_path(
    name: str, request: PathRequest, listing: Listing, manifest: Manifest
) -> LockedAsset:
    """Hashes the files that a `path:` entry takes.

    Args:
        name: of the asset.
        listing: from `list_path`.

    Raises:
        PolicyError: a name that is not allowed in a bundle.
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
    what = f"{manifest.place(name, 'path')}: `{name}`"
    targets = [f"{asset.folder}/{path}" for path in listing.sizes]
    check_paths(targets, what, way_without(asset.request))
    for path in listing.sizes:
        digests = hash_file(listing.file(path))
        target = f"{asset.folder}/{path}"
        files.append(LockedFile(target, digests.size, digests.sha256, None, path))
    if request.convert:
        made_from = tuple(Ingredient(file.origin, file.size, file.sha256) for file in files)
        return replace(asset, kind="dataset", made_from=made_from, left_out=listing.left_out)
    return replace(asset, files=tuple(files), left_out=listing.left_out)


def local_file(asset: LockedAsset, origin: str, manifest: Manifest) -> Path:
    """The path on this machine of a locked file of a `path:` asset.

    Raises:
        PolicyError: an unsafe path in the lock, which another user may have written.
    """
    check_path(origin, f"{manifest.lock_path}: `{asset.name}`")
    base = local_base(asset.source.location, manifest)
    return base if base.is_file() else base / origin


def unchanged(
    asset: LockedAsset, ingredient: Ingredient, manifest: Manifest, progress: Callable[[int], None]
) -> tuple[Path, FileDigests]:
    """The path and digests of a local file that is converted or unpacked.

    Raises:
        UsageError: it is gone, or changed since it was locked.
    """
    path = local_file(asset, ingredient.origin, manifest)
    digests = hash_file(path, progress=progress) if path.is_file() else None
    return path, _as_locked(path, digests, ingredient.sha256, take_as_it_is(asset, manifest))


def bring_local(
    source: Path, file: LockedFile, target: Path, progress: Callable[[int], None], remedy: str
) -> FileDigests:
    """Copies a local file to `target`, if it has not changed since it was locked.

    Args:
        remedy: of the error.

    Raises:
        UsageError: it is gone or changed; `target` does not exist then.
    """
    digests = copy_hashed(source, target, file.size, progress) if source.is_file() else None
    try:
        return _as_locked(source, digests, file.sha256, remedy)
    except UsageError:
        target.unlink(missing_ok=True)
        raise


def take_as_it_is(asset: LockedAsset, manifest: Manifest) -> str:
    """The remedy for local files that are gone or changed since they were locked."""
    return f"To take it as it is now: {manifest.update_command(asset.name)}"


def _as_locked(
    path: Path | str, digests: FileDigests | None, sha256: str | None, remedy: str
) -> FileDigests:
    if digests is None or digests.sha256 != sha256:
        raise UsageError(f"{path}: {'changed' if digests else 'gone'} since it was locked.", remedy)
    return digests
