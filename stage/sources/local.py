"""Local files: a file or folder beside the manifest becomes an asset of files, or what a dataset is converted from."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from stage.convert import chosen
from stage.digest import FileDigests, hash_file
from stage.errors import PolicyError, UsageError
from stage.lockfile import Ingredient, LeftOut, LockedAsset, LockedFile, Source
from stage.manifest import Manifest, PathRequest, as_lock_request
from stage.names import check_path, printable
from stage.sources.partial import copy_hashed
from stage.sources.selection import matches


def resolve_path(name: str, request: PathRequest, manifest: Manifest) -> LockedAsset:
    """Lists and hashes what a `path:` entry points to.

    Raises:
        UsageError: nothing there, nothing in it, or a pattern that matches nothing.
        PolicyError: a symbolic link, a special file, or a name that may not be in a bundle.
    """
    place = manifest.place(name, "path")
    try:
        base = local_base(request.path, manifest)
    except RuntimeError:
        raise UsageError(f"{place}: `{name}`: there is no home folder for {request.path}.", "Write it out.") from None
    if base.exists() and not (base.is_file() or base.is_dir()):
        raise UsageError(f"{place}: `{name}`: {base} is neither a file nor a folder.", "Name a file or a folder.")
    if not base.exists():
        raise UsageError(f"{place}: `{name}`: there is no {base}.", "Paths are relative to the manifest's folder.")
    found = {base.name: base} if base.is_file() else _walk(base, f"{place}: `{name}`")
    for pattern in request.include:
        if not any(matches(path, pattern) for path in found):
            raise UsageError(
                f"{place}: `{name}`: the pattern `{pattern[:80]}` matches none of the {len(found)} files in {base}.",
                f"There are: {', '.join(map(printable, sorted(found)[:8]))}{', ...' if len(found) > 8 else ''}",
            )
    asset = LockedAsset(
        name=name,
        kind="files",
        request=as_lock_request(request),
        source=Source("path", request.path),
        files=(),
    )
    if request.convert:
        asked = [p for p in found if not _why_left(p, request)]
        read = set(chosen(request.convert, asked, f"{place}: `{name}`")) if asked else set()
    files, left_out = [], []
    for path, file in sorted(found.items()):
        reason = _why_left(path, request)
        if reason is None and file.absolute() == manifest.lock_path.absolute():
            reason = "the lock of this manifest, which is written anew"
        if reason is None and request.convert and path not in read:
            reason = f"not read by `convert: {request.convert}`"
        if reason:
            left_out.append(LeftOut(path, file.stat().st_size, reason))
        else:
            check_path(f"{asset.folder}/{path}", f"{place}: `{name}`")
            digests = hash_file(file)
            files.append(LockedFile(f"{asset.folder}/{path}", digests.size, digests.sha256, None, path))
    if not files:
        raise UsageError(f"{place}: `{name}`: {base} has no file to take.", "Check the path, `include` and `exclude`.")
    if request.convert:
        made_from = tuple(Ingredient(file.origin, file.size, file.sha256) for file in files)
        return replace(asset, kind="dataset", made_from=made_from, left_out=tuple(left_out))
    return replace(asset, files=tuple(files), left_out=tuple(left_out))


def check_csv_headers(asset: LockedAsset, request: PathRequest, manifest: Manifest) -> None:
    """Tells a CSV with another separator when it is resolved: what else is asked for may take hours to download.

    Raises:
        UsageError: there is one.
    """
    if request.convert != "csv":
        return
    from stage.convert.readers import check_csv

    for ingredient in asset.made_from:
        what = f"{manifest.place(asset.name, 'path')}: `{asset.name}`"
        check_csv(ingredient.origin, local_file(asset, ingredient.origin, manifest), what, request.separator)


def _why_left(path: str, request: PathRequest) -> str | None:
    """Why the patterns leave a file behind; None if they don't."""
    if any(matches(path, pattern) for pattern in request.exclude):
        return "excluded by the manifest"
    if request.include and not any(matches(path, pattern) for pattern in request.include):
        return "not in the manifest's `include`"
    return None


def local_base(path: str, manifest: Manifest) -> Path:
    """Where a `path:` entry points: relative to the manifest's folder."""
    return manifest.path.parent / Path(path).expanduser()


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


def _walk(base: Path, what: str) -> dict[str, Path]:
    """Regular files below a folder. A link is refused: following it could take in anything."""
    found: dict[str, Path] = {}
    for folder, _, _ in os.walk(base):
        for entry in sorted(os.scandir(folder), key=lambda e: e.name):
            path = Path(entry.path)
            mode = entry.stat(follow_symlinks=False).st_mode
            if stat.S_ISREG(mode):
                found[path.relative_to(base).as_posix()] = path
            elif not stat.S_ISDIR(mode):
                raise PolicyError(
                    f"{what}: {printable(str(path))} is a link or a special file; a bundle holds regular files only.",
                    "Put the file itself there, or leave it out with `exclude`.",
                )
    return found
