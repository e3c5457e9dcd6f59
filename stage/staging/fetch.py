"""`stage fetch`: from a manifest to a finished bundle.

    manifest -> lock, resolved -> plan and checks -> files here are hashed, others fetched or made
    -> lock, complete -> load test -> disk synced -> files beside the payload, the seal last

The seal is the tag manifest with its signature, if there is one: with it a bundle is finished.

Every run does the same, whatever an earlier run left. No run remembers how far it came. So an
interruption at any moment leaves either a finished bundle, or one that the same command resumes.

The lock is written twice. The resolved one pins commits and files. The complete one has the facts
that only the fetched bytes show: digests that were not published, rows and columns of parquet.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from stage.bundle.bundle import LOCK, REQUEST, SIGNATURE, TAG_MANIFEST, finish_bundle, verify
from stage.download.http import together
from stage.errors import Mistakes, UsageError, quoted
from stage.files import (
    FileDigests,
    MismatchError,
    check_space,
    check_writable,
    free_space,
    hash_file,
    human_count,
    human_size,
    sync_disk,
    write_atomically,
)
from stage.lock.manifest import Manifest
from stage.lock.model import LockedAsset, LockedFile, Lockfile
from stage.progress import Reporter
from stage.staging.load_test import check_loads
from stage.staging.resolve import (
    check_complete_for_loading,
    check_names,
    check_nesting,
    look_at_local,
    open_sources,
    read_previous,
    resolve,
)
from stage.staging.sources.source import (
    AssetSource,
    FetchOptions,
    FetchRun,
    Progress,
    build_asset,
    with_rows,
)
from stage.staging.working_folder import SharedStore, Sharing, WorkFolder, alone_in, clearing
from stage.version import __version__

# Times the size of its packages: once for the image, which is as large as they are (docs/adr/0010),
# and an estimate of three times for the packages unpacked, which are there until the image is made.
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

    here: Collection[str]
    shared: tuple[LockedFile, ...]
    downloads: tuple[LockedFile, ...]
    built: frozenset[str]
    made: tuple[LockedFile, ...]
    unknown: tuple[LockedAsset, ...]
    inputs: tuple[int, ...]
    space: int

    @staticmethod
    def of(lock: Lockfile, here: Collection[str], sharing: Sharing, partial_size: int) -> Plan:
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
            # No path yet: a copy on this machine is found by the digest alone.
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


Pair = tuple[LockedAsset, LockedFile]
SMALL = 2**20  # bytes


def fetch_manifest(
    manifest_path: Path, root: Path, options: FetchOptions, reporter: Reporter
) -> FetchOutcome:
    """Makes `root` the bundle that a manifest describes.

    Raises:
        StageError: exit code 1 bytes are not as announced, 2 a bad request, 3 policy, 5 run it
            again.
    """
    manifest = replace(Manifest.load(manifest_path), output=root)
    check_nesting(root, manifest)
    check_writable(root)
    # A dry run neither makes the folder nor locks it: it may look while a fetch is running there.
    with nullcontext() if options.dry_run else alone_in(root):
        folder = WorkFolder.inspect(root)
        folder.check_same_bundle(manifest)
        previous = read_previous(manifest)
        run = FetchRun.connected(manifest, options, reporter)
        sources = open_sources(run)
        local = look_at_local(run, previous, sources)
        check_space_for_local(root, local, folder, options.store)
        lock = resolve(run, previous, sources)
        try:
            check_complete_for_loading(manifest, lock.assets)
        except UsageError as error:
            # It is the load test's error, found before the downloads. Without that test
            # (--no-offline-check) the person wants the files as they are: other code may load them.
            if options.offline_check:
                raise
            reporter.warn(error.message)
        wanted = {file.path for file in lock.files}
        sharing = Sharing(options.store, root, reporter, folder.unwanted(wanted))
        plan = Plan.of(lock, folder.present(lock), sharing, folder.partial_size)
        if options.dry_run:
            print_plan(plan, lock, root, folder, reporter)
        stale = folder.stale(wanted)
        check_space(root, plan.space, clearing(options.store, root))
        if options.dry_run:
            files, size = len(lock.files), lock.size
            return FetchOutcome(root, manifest.lock_path, None, files, size, dry_run=True)
        resolved = _resolved(lock, previous, sources)
        if resolved.assets:
            write_lock(resolved, manifest.lock_path)
        return _Fetch(run, sources, lock, folder, sharing).carry_out(plan, stale)


def lock_manifest(manifest_path: Path, options: FetchOptions, reporter: Reporter) -> None:
    """`stage lock`: resolves what the lock does not answer and writes the lock.

    Raises:
        StageError: as for `resolve`.
    """
    manifest = Manifest.load(manifest_path)
    lock = resolve_manifest(manifest, options, reporter)
    try:
        check_complete_for_loading(manifest, lock.assets)
    except UsageError as error:
        # Only `fetch` knows whether the files have to load: it has the option --no-offline-check.
        reporter.warn(str(error))
    wrote = write_lock(lock, manifest.lock_path)
    reporter.note(f"{manifest.lock_path}: {'written' if wrote else 'unchanged'}")


def resolve_manifest(manifest: Manifest, options: FetchOptions, reporter: Reporter) -> Lockfile:
    """The lock that answers a manifest; nothing is written.

    Raises:
        StageError: as for `resolve`.
    """
    previous = read_previous(manifest)
    run = FetchRun.connected(manifest, options, reporter)
    sources = open_sources(run)
    look_at_local(run, previous, sources)
    return resolve(run, previous, sources)


def write_lock(lock: Lockfile, path: Path, text: Iterable[bytes] | None = None) -> bool:
    """Writes a lock, unless the file has this text already.

    Args:
        text: its text, where that is in a file already; None: it is made, of 400,000 files for
            seconds.

    Returns:
        Whether it wrote.
    """
    if path.is_file() and hash_file(path).sha256 == lock.id:
        return False
    write_atomically(path, lock.pieces() if text is None else text)
    return True


def _resolved(
    lock: Lockfile, previous: Lockfile | None, sources: Mapping[str, AssetSource[Any]]
) -> Lockfile:
    """The lock to write before the bundle is finished: new pins of some sources wait until then."""
    old = previous.assets if previous else {}
    waiting = {
        name
        for name, asset in lock.assets.items()
        if asset is not old.get(name) and not sources[name].is_pinned_when_resolved
    }
    if not waiting:
        return lock
    assets = {name: old.get(name) if name in waiting else a for name, a in lock.assets.items()}
    return replace(lock, assets={name: asset for name, asset in assets.items() if asset})


class _Fetch:
    """One run of `stage fetch`, after resolving.

    Attributes:
        digests: payload path -> digests of the bytes that are in place.
        shared: paths of files that are on this machine, as the plan has them.
        to_make: names of assets whose files are made here. A copy in the store may be found to be
            damaged: then its asset is made after all.
        received: sizes of the files that came from sources or were made.
    """

    def __init__(
        self,
        run: FetchRun,
        sources: Mapping[str, AssetSource[Any]],
        lock: Lockfile,
        folder: WorkFolder,
        sharing: Sharing,
    ) -> None:
        self.run, self.sources, self.lock = run, sources, lock
        self.options, self.reporter, self.manifest = run.options, run.reporter, run.manifest
        self.root, self.folder, self.sharing = folder.root, folder, sharing
        self.digests: dict[str, FileDigests] = {}
        self.shared: set[str] = set()
        self.to_make: set[str] = set()
        self.received: list[int] = []

    def carry_out(self, plan: Plan, stale: Sequence[str]) -> FetchOutcome:
        """Checks the files that are here, brings the others, and finishes the bundle."""
        self._check(plan.here)
        sound = frozenset(self.digests)
        if sound != plan.here:  # damaged files are missing too
            plan = Plan.of(self.lock, sound, self.sharing, self.folder.partial_size)
        self.to_make |= plan.built
        for name in sorted(plan.built):
            self.sources[name].check_can_make(self.lock.assets[name])
        self.shared |= {file.path for file in plan.shared}
        absent = self.shared | {file.path for file in plan.downloads}
        if not absent and not self.to_make and not stale and self._is_finished():
            self.reporter.note(f"{self.root}: complete already; nothing to do")
        else:
            sealed = _sealed(self.root)
            self.folder.mark_unfinished({file.path for file in self.lock.files})
            self._each("fetch", absent, self._bring)
            self.sharing.report_taken()
            self._make()
            self._finish(stale, sealed)
        with open(self.root / LOCK, "rb") as text:
            write_lock(self.lock, self.manifest.lock_path, text)
        # Last: other bundles take what the store has, so it gets only files that are hashed, that
        # load, and that are on the disk. And a store that fails costs no bundle.
        self.sharing.keep(self.digests)
        return self._outcome()

    def _check(self, here: Collection[str]) -> None:
        """Hashes the files that are here."""
        if not here:
            return
        size = human_size(sum(file.size for file in self.lock.files if file.path in here))
        self.reporter.note(f"checking {human_count(len(here), 'file')} ({size}) already here")

        def check(asset: LockedAsset, file: LockedFile, progress: Progress) -> None:
            try:
                self.digests[file.path] = file.expected.verify(self.root / file.path, progress)
            except MismatchError:
                self.reporter.warn(f"{file.path}: here, but not as locked; fetching it again")

        self._each("check", here, check, local=True)

    def _bring(self, asset: LockedAsset, file: LockedFile, progress: Progress) -> None:
        """Takes a file that is on this machine already, else fetches it."""
        digests = self.sharing.take(file, progress) if file.path in self.shared else None
        if digests is None and file.made_by:  # what the store had was damaged
            self.sources[asset.name].check_can_make(asset)
            self.to_make.add(asset.name)
            return
        if digests is None:
            target = self.root / file.path
            # What is there has other bytes than locked. They go now: a final name has the locked
            # bytes or none, however this fetch ends, and the new file may need their space.
            if file.path in self.folder.sizes:
                target.unlink(missing_ok=True)
            digests = self.sources[asset.name].fetch(asset, file, target, progress)
            self.received.append(digests.size)
        self.digests[file.path] = digests

    def _make(self) -> None:
        """Makes files that are not as published. One asset's mistake does not hide another's."""
        mistakes = Mistakes()
        for name in sorted(self.to_make):
            with mistakes:
                asset, source = self.lock.assets[name], self.sources[name]
                asset, digests = build_asset(asset, source, self.folder, self.sharing)
                self.digests.update(digests)
                self.received += [made.size for made in digests.values()]
                self.lock = self.lock.with_asset(asset)
                check_names(self.lock, self.manifest)
        mistakes.check(str(self.manifest.path))

    def _finish(self, stale: Sequence[str], sealed: tuple[bytes, bytes] | None) -> None:
        """Completes the lock, drops stale files, tries to load the others, and seals."""
        self.lock = completed(self.lock, self.digests, self.root)
        for path, digests in self.digests.items():
            self.reporter.detail(f"{path}: sha256 {digests.sha256}")
        # Files that were made for the first time are in the lock only now. An earlier bundle's file
        # of the same name was stale before, and is this bundle's file since it was made.
        stale = sorted({*stale} - {file.path for file in self.lock.files})
        if stale:
            size = human_size(sum(self.folder.sizes[path] for path in stale))
            files = f"{human_count(len(stale), 'file')} ({size})"
            self.reporter.note(
                f"{self.root}: removes {files} that {self.manifest.path} does not ask for"
            )
        self.folder.clear(stale)
        if self.options.offline_check:
            with self.reporter.at_work("load"):
                check_loads(self.root, self.lock, self.reporter)
        if not sync_disk(self.root):
            self.reporter.note("this system has no syncfs: each file was put on the disk by itself")
        finish_bundle(self.root, self.lock, self.manifest.text, _facts(self.run.hub.name))
        self._sign_as_before(sealed)

    def _sign_as_before(self, sealed: tuple[bytes, bytes] | None) -> None:
        """Restores the signature if the tag manifest is the same again, as after a repair."""
        if sealed is None:
            return
        tag_manifest, signature = sealed
        if (self.root / TAG_MANIFEST).read_bytes() == tag_manifest:
            write_atomically(self.root / SIGNATURE, signature)
        else:
            self.reporter.note(
                f"{self.root}: another bundle now, so not signed any more: "
                f"stage sign {quoted(self.root)} --key KEY"
            )

    def _is_finished(self) -> bool:
        """Whether finishing the folder again would change nothing, tag files included."""
        if not (self.root / TAG_MANIFEST).is_file() or not self.lock.is_complete:
            return False
        report = verify(self.root, "fast")
        if not report.ok or report.bundle_id != self.lock.id:
            return False
        return (self.root / REQUEST).read_bytes() == self.manifest.text

    def _outcome(self) -> FetchOutcome:
        """The result, printed as well."""
        # Below zero where files were made from an archive that an earlier run had fetched:
        # `received` has the files made, and `taken_over` the archive, which can be larger.
        size = max(0, sum(self.received) - self.run.downloader.taken_over)
        count, whole = len(self.lock.files), self.lock.size
        self.reporter.note(
            f"{self.root}: {human_count(count, 'file')}, {human_size(whole)}, "
            f"{human_size(size)} fetched"
        )
        lock_path = self.manifest.lock_path
        return FetchOutcome(self.root, lock_path, self.lock.id, count, whole, dry_run=False)

    def _each(
        self,
        what: str,
        paths: Collection[str],
        work: Callable[[LockedAsset, LockedFile, Progress], None],
        *,
        local: bool = False,
    ) -> None:
        """Runs `work` on files of the lock, several at once, the largest first.

        The first failure ends the others soon, and is the one that is raised. Small files of this
        machine are done one by one: of 100,000, threads cost three times as much time.

        Args:
            local: all files are on this machine; else their sources say so.
        """
        small: list[Pair] = []
        others: list[Pair] = []
        for asset in self.lock.assets.values():
            is_local = local or asset.source.is_local
            for file in asset.files:
                if file.path in paths:
                    (small if is_local and file.size <= SMALL else others).append((asset, file))
        others.sort(key=lambda pair: -pair[1].size)
        stop = self.run.downloader.stop.set
        size = sum(file.size for _, file in (*small, *others))
        with self.reporter.bytes_bar(what, size) as progress:
            together(lambda pair: work(*pair, progress), others, self.options.jobs, stop)
            for asset, file in small:
                work(asset, file, progress)


def _sealed(root: Path) -> tuple[bytes, bytes] | None:
    """The tag manifest and its signature; None if the bundle is not signed."""
    try:
        return (root / TAG_MANIFEST).read_bytes(), (root / SIGNATURE).read_bytes()
    except OSError:
        return None


def completed(lock: Lockfile, digests: Mapping[str, FileDigests], root: Path) -> Lockfile:
    """The lock with every sha256, row count and schema filled in.

    Args:
        digests: by payload path, of every file.

    Raises:
        DamageError: a shard is no parquet file, shards differ in schema, or the card declares
            another number of rows.
    """
    for asset in lock.assets.values():
        files = tuple(
            file if file.sha256 else replace(file, sha256=digests[file.path].sha256)
            for file in asset.files
        )
        complete = with_rows(replace(asset, files=files), lambda path: root / path)
        if complete != asset:  # else its text is known already
            lock = lock.with_asset(complete)
    return lock


def _facts(endpoint: str) -> list[tuple[str, str]]:
    """Facts of this fetch alone. They go into bag-info.txt, never into the lock."""
    return [
        ("Bagging-Date", datetime.now(timezone.utc).date().isoformat()),
        ("Bag-Software-Agent", f"airlift {__version__}"),
        ("Airlift-Endpoint", endpoint),
        ("Airlift-Host", platform.node() or "unknown"),
    ]
