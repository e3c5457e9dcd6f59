"""What a fetch would do (`--dry-run`), and what one did: numbers for people and for `--json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stage.asset import LockedAsset
from stage.disk import check_space, free_space, human_count, human_size
from stage.lockfile import Lockfile
from stage.manifest import Manifest
from stage.progress import Reporter
from stage.resolve import Resolution
from stage.sharing import Sharing
from stage.sources.listing import Listing
from stage.store import Store
from stage.workfolder import WorkFolder

ROOM_FOR_ENVIRONMENT = 4  # of its packages' size: the image, and the packages unpacked until that is made
ROOM_FOR_TAGS = 16 * 2**20  # bytes: manifests, lock and block digests beside the payload


@dataclass(frozen=True)
class FetchOutcome:
    """What a fetch did, or would do (`dry_run`). Sizes in bytes; `bundle_id` is None in a dry run.

    `shared_*`: what came from the store on this machine in place of the network.
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

    def to_json(self) -> dict[str, Any]:
        """As `--json` prints it."""
        return {
            "bundle": str(self.bundle),
            "bundle_id": self.bundle_id,
            "lock": str(self.lock_path),
            "files": self.files,
            "bytes": self.size,
            "fetched_files": self.fetched_files,
            "fetched_bytes": self.fetched_size,
            "shared_files": self.shared_files,
            "shared_bytes": self.shared_size,
            "dry_run": self.dry_run,
        }


@dataclass(frozen=True)
class Need:
    """What a fetch has to do, as far as names and sizes tell before it begins.

    Attributes:
        downloads, download_size: files to download, and their bytes: those of the bundle, and those that others are
            made of (an archive, CSV files of a repository).
        made, made_size: files that are made here (unpacked, converted), where an earlier fetch learned which.
        unknown: assets whose files are made here for the first time: nobody knows how many, nor how large.
        room: bytes of disk that it takes, at least.
    """

    downloads: int
    download_size: int
    made: int
    made_size: int
    unknown: tuple[str, ...]
    room: int


def need(lock: Lockfile, folder: WorkFolder, sharing: Sharing) -> Need:
    """Counts what is not here: for the plan of a dry run, and for the look at the disk before a fetch."""
    pairs = [(asset, file) for asset in lock.assets.values() for file in asset.files]
    absent = [(asset, file) for asset, file in pairs if folder.size_of(file.path) != file.size]
    shared = {file.path for _, file in absent if sharing.has(file)}
    missing = [(asset, file) for asset, file in absent if file.path not in shared]
    to_copy = sum(file.size for _, file in absent if file.path in shared and not sharing.is_free(file))
    new = {asset.name: asset for asset in lock.assets.values() if asset.made_from and not was_made(asset)}
    making = new | {asset.name: asset for asset, file in missing if file.made_by}
    inputs = {
        (asset.name, i.origin): i.size or 0  # a file may be in two splits
        for asset in making.values()
        if asset.source.type != "path"  # read where they lie
        for i in asset.made_from
    }
    downloads = [file for _, file in missing if not file.made_by]
    made = [file for _, file in missing if file.made_by]
    download_size = sum(file.size for file in downloads) + sum(inputs.values())
    environments = sum(ROOM_FOR_ENVIRONMENT * a.size for a in making.values() if a.environment is not None)
    room = download_size + sum(file.size for file in made) + to_copy + environments
    return Need(
        downloads=len(downloads) + len(inputs),
        download_size=download_size,
        made=len(made),
        made_size=sum(file.size for file in made),
        unknown=tuple(new),
        room=max(0, room - folder.partial_size) + (ROOM_FOR_TAGS if absent or making else 0),
    )


def check_room_for_local(
    root: Path, listings: Mapping[str, Listing], manifest: Manifest, folder: WorkFolder, store: Store | None
) -> None:
    """Whether files beside the manifest have room in the bundle, by their sizes: hashing them may take an hour.

    Raises:
        IncompleteError: they have not, even if all of them that have the size of something here are just that.
    """
    wanted = {
        f"data/files/{name}/{path}": size
        for name, listing in listings.items()
        if getattr(manifest.requests[name], "convert", None) is None  # how large that becomes, nobody knows
        for path, size in listing.sizes.items()
    }
    coming = [size for path, size in wanted.items() if folder.size_of(path) != size]
    if sum(coming) <= free_space(root):
        return
    here = set(folder.sizes.values())
    if store is not None and store.shares_disk_with(root):
        here |= store.sizes()
    check_space(root, sum(size for size in coming if size not in here) - folder.partial_size)


def plan(resolution: Resolution, root: Path, folder: WorkFolder, sharing: Sharing, reporter: Reporter) -> FetchOutcome:
    """Prints what a fetch would do, by name and size alone.

    Raises:
        UsageError: files nobody fetched lie in the folder.
        IncompleteError: the disk has no room.
    """
    lock = resolution.lock
    absent = [file for file in lock.files if folder.size_of(file.path) != file.size]
    shared = [file for file in absent if sharing.has(file)]
    missing = [file for file in absent if not sharing.has(file)]
    states = {file.path: "share" for file in shared} | {f.path: "make" if f.made_by else "fetch" for f in missing}
    for file in lock.files:
        reporter.note(f"  {states.get(file.path, 'here'):5} {human_size(file.size):>9}  {file.path}")
    stale = folder.stale({file.path for file in lock.files})
    needed = need(lock, folder, sharing)
    for name in needed.unknown:
        asset = lock.assets[name]
        inputs = {i.origin: i.size or 0 for i in asset.made_from}
        of = f"{human_count(len(inputs), 'file')} ({human_size(sum(inputs.values()))}) of {asset.source.location}"
        reporter.note(f"  make          ?  {asset.folder}/ from {of}")
    for path in stale:
        reporter.note(f"  drop             {path}")
    shared_size = sum(file.size for file in shared)
    too = f"; {human_count(len(shared), 'file')} ({human_size(shared_size)}) more are on this machine" if shared else ""
    reporter.note(f"would fetch {_work_in_words(needed)}{too}")
    reporter.note(f"{root}: {_bundle_in_words(lock, needed)}")
    reporter.note(f"room: {human_size(needed.room)} needed{' at least' if needed.unknown else ''}, {_free(root)} free")
    check_space(root, needed.room)
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


def _work_in_words(needed: Need) -> str:
    words = f"{human_count(needed.downloads, 'file')}, {human_size(needed.download_size)}"
    if needed.made:
        words += f", and make {human_count(needed.made, 'file')}, {human_size(needed.made_size)}, here"
    return words


def _bundle_in_words(lock: Lockfile, needed: Need) -> str:
    words = f"{human_count(len(lock.files), 'file')}, {human_size(lock.size)}"
    if not needed.unknown:
        return words
    made = (
        f"what is made here for {', '.join(f'`{name}`' for name in needed.unknown)} (its size is known when it is made)"
    )
    return f"{words}, and {made}" if lock.files else made


def _free(root: Path) -> str:
    return human_size(free_space(root))


def was_made(asset: LockedAsset) -> bool:
    """Whether the files that are made here were made once, so that the lock names them."""
    return any(file.made_by for file in asset.files)
