"""What a fetch would do (`--dry-run`), and what one did: numbers for people and for `--json`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stage.disk import check_space, human_count, human_size
from stage.lockfile import LockedAsset
from stage.progress import Reporter
from stage.resolve import Resolution
from stage.sharing import Sharing
from stage.workfolder import WorkFolder


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


def plan(resolution: Resolution, root: Path, folder: WorkFolder, sharing: Sharing, reporter: Reporter) -> FetchOutcome:
    """Prints what a fetch would do, by name and size alone.

    Raises:
        UsageError: files nobody fetched lie in the folder.
        IncompleteError: the disk has no room.
    """
    lock = resolution.lock
    absent = [file for file in lock.files if folder.size_of(file.path) != file.size]
    shared = [file for file in absent if sharing.has(file)]
    states = {file.path: "fetch" for file in absent} | {file.path: "share" for file in shared}
    missing = [file for file in absent if states[file.path] == "fetch"]
    for file in lock.files:
        state = states.get(file.path, "here")
        reporter.note(f"  {state:5} {human_size(file.size):>9}  {file.path}")
    to_make = [asset for asset in lock.assets.values() if asset.made_from and not was_made(asset)]
    for asset in to_make:
        size = sum(i.size or 0 for i in asset.made_from)
        reporter.note(f"  make  {human_size(size):>9}  {asset.folder}/ from {asset.source.location}")
    stale = folder.stale({file.path for file in lock.files})
    for path in stale:
        reporter.note(f"  drop             {path}")
    size = sum(file.size for file in missing) + sum(i.size or 0 for asset in to_make for i in asset.made_from)
    count = human_count(len(missing) + sum(len(asset.made_from) for asset in to_make), "file")
    shared_size = sum(file.size for file in shared)
    too = f"; {human_count(len(shared), 'file')} ({human_size(shared_size)}) more are on this machine" if shared else ""
    reporter.note(f"would fetch {count}, {human_size(size)} of {human_size(lock.size)}, into {root}{too}")
    to_copy = sum(file.size for file in shared if not sharing.is_free(file))
    check_space(root, max(0, size + to_copy - folder.partial_size))
    return FetchOutcome(
        root,
        resolution.lock_path,
        None,
        len(lock.files),
        lock.size,
        len(missing),
        size,
        len(shared),
        shared_size,
        True,
    )


def was_made(asset: LockedAsset) -> bool:
    """Whether the files that are made here were made once, so that the lock names them."""
    return any(file.made_by for file in asset.files)
