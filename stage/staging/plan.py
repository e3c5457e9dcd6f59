"""What a fetch would do (`--dry-run`), and what it did: numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path

from stage.files import check_space, free_space, human_count, human_size
from stage.lock.model import LockedAsset, LockedFile
from stage.lock.write import Lockfile
from stage.progress import Reporter
from stage.staging.store import SharedStore, Sharing, clearing
from stage.staging.working_folder import WorkFolder

# Times the size of its packages: the image, and the packages unpacked until the image is made.
SPACE_FOR_ENVIRONMENT = 4
SPACE_FOR_TAGS = 16 * 2**20  # bytes: manifests and lock beside the payload


@dataclass(frozen=True)
class FetchOutcome:
    """The bundle that a fetch made, or would make (`dry_run`): then `bundle_id` is None.

    Attributes:
        size: of all its files, in bytes.
    """

    bundle: Path
    lock_path: Path
    bundle_id: str | None
    files: int
    size: int
    dry_run: bool


@dataclass(frozen=True)
class Plan:
    """The work of a fetch. `--dry-run` prints it, and a fetch does what it says.

    Attributes:
        here: paths of files that are in the bundle's folder.
        shared: files that are on this machine, under another name or in the store.
        downloads: files to fetch from their sources.
        built: names of the assets of which files are made here (unpacked, converted).
        made: missing files of these, if an earlier fetch made them once.
        unknown: those made for the first time: files in unknown number and size.
        inputs: bytes of each file that others are made from (an archive, CSV files of a
            repository) and that is to be downloaded.
        space: bytes of disk space that it needs, at least.
    """

    here: AbstractSet[str]
    shared: tuple[LockedFile, ...]
    downloads: tuple[LockedFile, ...]
    built: frozenset[str]
    made: tuple[LockedFile, ...]
    unknown: tuple[LockedAsset, ...]
    inputs: tuple[int, ...]
    space: int

    @staticmethod
    def of(lock: Lockfile, here: AbstractSet[str], sharing: Sharing, partial_size: int) -> Plan:
        """Decides where each file that is missing comes from.

        Args:
            partial_size: bytes that interrupted downloads left there.
        """
        assets = lock.assets.values()
        absent = [file for file in lock.files if file.path not in here]
        is_shared = {file.path for file in absent if sharing.has(file)}
        unknown = [asset for asset in assets if asset.made_from and not was_made(asset)]
        to_make = {file.path for file in absent if file.made_by} - is_shared
        built = [a for a in assets if any(file.path in to_make for file in a.files)] + unknown
        # One file that must be made brings all files of its asset that are made.
        made = {file.path: file for a in built for file in a.files if file.made_by}
        others = [file for file in absent if file.path not in made]
        shared = [file for file in others if file.path in is_shared]
        downloads = [file for file in others if file.path not in is_shared]
        missing = [file for file in absent if file.path in made]
        inputs = {
            (asset.name, i.origin): i.size or 0  # a file may be in two splits
            for asset in built
            if not asset.source.is_local  # these are read in place
            for i in asset.made_from
            if asset.environment is None or not sharing.has(i.at(""))
        }
        environments = sum(
            i.size or 0 for asset in built if asset.environment is not None for i in asset.made_from
        )
        space = _size(downloads) + _size(missing) + sum(inputs.values())
        space += sum(file.size for file in shared if not sharing.is_free(file))
        space += SPACE_FOR_ENVIRONMENT * environments - partial_size
        return Plan(
            here,
            tuple(shared),
            tuple(downloads),
            frozenset(asset.name for asset in built),
            tuple(missing),
            tuple(unknown),
            tuple(inputs.values()),
            max(0, space) + (SPACE_FOR_TAGS if absent or built else 0),
        )


def _size(files: Iterable[LockedFile]) -> int:
    return sum(file.size for file in files)


def was_made(asset: LockedAsset) -> bool:
    """Whether a fetch made the files of this asset once, so that the lock names them."""
    return any(file.made_by for file in asset.files)


def check_space_for_local(
    root: Path, wanted: Mapping[str, int], folder: WorkFolder, store: SharedStore | None
) -> None:
    """Checks the disk space for files of this machine, by size: hashing them may take an hour.

    Args:
        wanted: payload path -> bytes.

    Raises:
        IncompleteError: there is too little space, even if each file with the size of a file in the
            bundle or the store is that file.
    """
    coming = [size for path, size in wanted.items() if folder.sizes.get(path) != size]
    if sum(coming) <= free_space(root):
        return
    here = set(folder.sizes.values())
    if store is not None and store.shares_disk_with(root):
        here |= store.sizes()
    needed = sum(size for size in coming if size not in here) - folder.partial_size
    check_space(root, needed, clearing(store, root))


def print_plan(
    plan: Plan, lock: Lockfile, root: Path, folder: WorkFolder, reporter: Reporter
) -> None:
    """Prints what a fetch would do, by name and size alone, and what it did not check.

    Raises:
        UsageError: the folder has files that no fetch wrote.
    """
    states = {file.path: "share" for file in plan.shared}
    states |= {file.path: "fetch" for file in plan.downloads}
    states |= {file.path: "make" for file in plan.made}
    for file in lock.files:
        reporter.note(
            f"  {states.get(file.path, 'here'):5} {human_size(file.size):>9}  {file.path}"
        )
    for asset in plan.unknown:
        inputs = {i.origin: i.size or 0 for i in asset.made_from}
        of = f"{human_count(len(inputs), 'file')} ({human_size(sum(inputs.values()))})"
        reporter.note(f"  make          ?  {asset.folder}/ from {of} of {asset.source.location}")
    for path in folder.stale({file.path for file in lock.files}):
        reporter.note(f"  drop             {path}")
    count = human_count(len(plan.downloads) + len(plan.inputs), "file")
    work = f"{count}, {human_size(_size(plan.downloads) + sum(plan.inputs))}"
    if plan.made:
        made = human_count(len(plan.made), "file")
        work += f", and make {made}, {human_size(_size(plan.made))}, here"
    if plan.shared:
        shared = human_count(len(plan.shared), "file")
        work += f"; {shared} ({human_size(_size(plan.shared))}) more are on this machine"
    reporter.note(f"would fetch {work}")
    bundle = [f"{human_count(len(lock.files), 'file')}, {human_size(lock.size)}"]
    if names := ", ".join(f"`{asset.name}`" for asset in plan.unknown):
        new = f"what is made here for {names} (its size is known when it is made)"
        bundle = [*bundle, new] if lock.files else [new]
    reporter.note(f"{root}: {', and '.join(bundle)}")
    at_least = " at least" if plan.unknown else ""
    free = human_size(free_space(root))
    reporter.note(f"space: {human_size(plan.space)} needed{at_least}, {free} free")
    unchecked = ["the bytes of files that are not here yet"]
    unchecked = unchecked if plan.downloads or plan.inputs else []
    if plan.unknown:
        is_csv = any(
            a.request.get("path") and a.request.get("convert") == "csv" for a in plan.unknown
        )
        only = " (of a local CSV it read the beginning only)" if is_csv else ""
        unchecked.append(f"whether {names} can be unpacked and converted{only}")
    unchecked.append("whether everything loads without network")
    reporter.note(f"--dry-run did not check: {'; '.join(unchecked)}")
