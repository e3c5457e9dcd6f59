"""What a fetch would do (`--dry-run`), and what it did: numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from stage.bundle.working_folder import WorkFolder
from stage.files import check_space, free_space, human_count, human_size
from stage.lock.manifest import Manifest
from stage.lock.model import LockedAsset
from stage.lock.write import Lockfile
from stage.progress import Reporter
from stage.staging.resolve import Resolution
from stage.staging.sources.listing import Listing
from stage.staging.store import SharedStore, Sharing

# Times the size of its packages: the image, and the packages unpacked until the image is made.
SPACE_FOR_ENVIRONMENT = 4
SPACE_FOR_TAGS = 16 * 2**20  # bytes: manifests and lock beside the payload


@dataclass(frozen=True)
class FetchOutcome:
    """What a fetch did, or would do (`dry_run`). Sizes in bytes; `bundle_id` is None in a dry run.

    `shared_*`: files that came from the store on this machine instead of the network.
    """

    bundle: Path
    lock_path: Path
    bundle_id: str | None
    files: int
    size: int
    fetched_files: int
    fetched_size: int
    shared_files: int
    shared_size: int
    dry_run: bool


@dataclass(frozen=True)
class Need:
    """The work of a fetch, as far as names and sizes show before it begins.

    Attributes:
        downloads, download_size: files to download, and their bytes: files of the bundle, and files
            that others are made from (an archive, CSV files of a repository).
        made, made_size: files that are made here (unpacked, converted), if an earlier fetch made
            them once.
        unknown: assets whose files are made here for the first time, in unknown number and size.
        space: bytes of disk space that it needs, at least.
    """

    downloads: int
    download_size: int
    made: int
    made_size: int
    unknown: tuple[str, ...]
    space: int


def need(lock: Lockfile, folder: WorkFolder, sharing: Sharing) -> Need:
    """Counts missing files, for the plan of a dry run and for the check of the disk."""
    pairs = [(asset, file) for asset in lock.assets.values() for file in asset.files]
    absent = [(asset, file) for asset, file in pairs if folder.size_of(file.path) != file.size]
    shared = {file.path for _, file in absent if sharing.has(file)}
    missing = [(asset, file) for asset, file in absent if file.path not in shared]
    to_copy = sum(
        file.size for _, file in absent if file.path in shared and not sharing.is_free(file)
    )
    new = {
        asset.name: asset
        for asset in lock.assets.values()
        if asset.made_from and not was_made(asset)
    }
    built = new | {asset.name: asset for asset, file in missing if file.made_by}
    inputs = {
        (asset.name, i.origin): i.size or 0  # a file may be in two splits
        for asset in built.values()
        if asset.source.type != "path"  # these are read in place
        for i in asset.made_from
    }
    downloads = [file for _, file in missing if not file.made_by]
    made = [file for _, file in missing if file.made_by]
    download_size = sum(file.size for file in downloads) + sum(inputs.values())
    environments = sum(
        SPACE_FOR_ENVIRONMENT * a.size for a in built.values() if a.environment is not None
    )
    space = download_size + sum(file.size for file in made) + to_copy + environments
    return Need(
        downloads=len(downloads) + len(inputs),
        download_size=download_size,
        made=len(made),
        made_size=sum(file.size for file in made),
        unknown=tuple(new),
        space=max(0, space - folder.partial_size) + (SPACE_FOR_TAGS if absent or built else 0),
    )


def check_space_for_local(
    root: Path,
    listings: Mapping[str, Listing],
    manifest: Manifest,
    folder: WorkFolder,
    store: SharedStore | None,
) -> None:
    """Checks the disk space for files beside the manifest, by size: hashing them may take an hour.

    Raises:
        IncompleteError: there is too little space, even if each file with the size of a file in the
            bundle or the store is that file.
    """
    wanted = {
        f"data/files/{name}/{path}": size
        for name, listing in listings.items()
        # Nobody knows how large a converted file becomes.
        if getattr(manifest.requests[name], "convert", None) is None
        for path, size in listing.sizes.items()
    }
    coming = [size for path, size in wanted.items() if folder.size_of(path) != size]
    if sum(coming) <= free_space(root):
        return
    here = set(folder.sizes.values())
    if store is not None and store.shares_disk_with(root):
        here |= store.sizes()
    check_space(root, sum(size for size in coming if size not in here) - folder.partial_size)


def plan(
    resolution: Resolution, root: Path, folder: WorkFolder, sharing: Sharing, reporter: Reporter
) -> FetchOutcome:
    """Prints what a fetch would do, by name and size alone, and what it did not check.

    Raises:
        UsageError: the folder has files that no fetch wrote.
        IncompleteError: the disk has too little space.
    """
    lock = resolution.lock
    absent = [file for file in lock.files if folder.size_of(file.path) != file.size]
    shared = [file for file in absent if sharing.has(file)]
    missing = [file for file in absent if not sharing.has(file)]
    states = {file.path: "share" for file in shared} | {
        f.path: "make" if f.made_by else "fetch" for f in missing
    }
    for file in lock.files:
        reporter.note(
            f"  {states.get(file.path, 'here'):5} {human_size(file.size):>9}  {file.path}"
        )
    stale = folder.stale({file.path for file in lock.files})
    needed = need(lock, folder, sharing)
    for name in needed.unknown:
        asset = lock.assets[name]
        inputs = {i.origin: i.size or 0 for i in asset.made_from}
        size = human_size(sum(inputs.values()))
        origin = f"{human_count(len(inputs), 'file')} ({size}) of {asset.source.location}"
        reporter.note(f"  make          ?  {asset.folder}/ from {origin}")
    for path in stale:
        reporter.note(f"  drop             {path}")
    shared_size = sum(file.size for file in shared)
    too = (
        f"; {human_count(len(shared), 'file')} ({human_size(shared_size)}) more are on this machine"
        if shared
        else ""
    )
    reporter.note(f"would fetch {_describe_work(needed)}{too}")
    reporter.note(f"{root}: {_describe_bundle(lock, needed)}")
    at_least = " at least" if needed.unknown else ""
    reporter.note(f"space: {human_size(needed.space)} needed{at_least}, {_free(root)} free")
    reporter.note(f"--dry-run did not check: {'; '.join(_unchecked(lock, needed))}")
    check_space(root, needed.space)
    return FetchOutcome(
        root,
        resolution.lock_path,
        None,
        len(lock.files),
        lock.size,
        needed.downloads + needed.made,
        needed.download_size + needed.made_size,
        len(shared),
        shared_size,
        True,
    )


def _unchecked(lock: Lockfile, needed: Need) -> list[str]:
    """What only the fetch itself checks."""
    unchecked = []
    if needed.downloads:
        unchecked.append("the bytes of files that are not here yet")
    if needed.unknown:
        names = ", ".join(f"`{name}`" for name in needed.unknown)
        local_csv = any(
            lock.assets[name].source.type == "path"
            and lock.assets[name].request.get("convert") == "csv"
            for name in needed.unknown
        )
        only = " (of a local CSV it read the first line only)" if local_csv else ""
        unchecked.append(f"whether {names} can be unpacked and converted{only}")
    return [*unchecked, "whether everything loads without network"]


def _describe_work(needed: Need) -> str:
    work = f"{human_count(needed.downloads, 'file')}, {human_size(needed.download_size)}"
    if needed.made:
        made = human_count(needed.made, "file")
        work += f", and make {made}, {human_size(needed.made_size)}, here"
    return work


def _describe_bundle(lock: Lockfile, needed: Need) -> str:
    known = f"{human_count(len(lock.files), 'file')}, {human_size(lock.size)}"
    if not needed.unknown:
        return known
    assets = ", ".join(f"`{name}`" for name in needed.unknown)
    made = f"what is made here for {assets} (its size is known when it is made)"
    return f"{known}, and {made}" if lock.files else made


def _free(root: Path) -> str:
    return human_size(free_space(root))


def was_made(asset: LockedAsset) -> bool:
    """Whether a fetch made the files of this asset once, so that the lock names them."""
    return any(file.made_by for file in asset.files)
