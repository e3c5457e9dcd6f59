"""From the lock to the bundle: checks the files that are here, fetches the others, finishes last.

Every run does the same three things, whatever an earlier run left: it hashes the files that are
there already, fetches missing and damaged ones, and writes the tag files. No run remembers how far
it came. So an interruption at any moment leaves either a finished bundle, or one that the same
command resumes.

The lock then gets the facts that only the fetched bytes show: digests that nobody published, rows
and columns of parquet files.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TypeVar

from stage.bundle import bundle as layout
from stage.bundle.inspect import parquet_footer
from stage.bundle.load_test import check_loads
from stage.bundle.verify import verify
from stage.bundle.working_folder import WorkFolder, alone_in
from stage.digests import FileDigests, hash_file
from stage.errors import DamageError, Mistakes
from stage.files import (
    check_space,
    check_writable,
    human_count,
    human_size,
    sync_disk,
    write_atomically,
)
from stage.lock.manifest import Manifest
from stage.lock.model import LockedAsset, LockedFile, LockedSplit
from stage.lock.write import Lockfile
from stage.progress import Reporter
from stage.staging.build import build_asset, check_may_make
from stage.staging.plan import FetchOutcome, check_space_for_local, need, plan, was_made
from stage.staging.prechecks import check_nesting
from stage.staging.resolve import (
    Resolution,
    check_names,
    loads_by_name,
    look_at_local,
    read_previous,
    resolve,
)
from stage.staging.sources.source import Sources
from stage.staging.store import SharedStore, Sharing
from stage.threads import together
from stage.version import __version__


def completed(lock: Lockfile, digests: Mapping[str, FileDigests], root: Path) -> Lockfile:
    """The lock with every sha256, row count and schema filled in.

    Args:
        digests: by payload path, of every file.

    Raises:
        DamageError: a shard is no parquet file, shards differ in schema, or the card declares
            another number of rows.
    """
    for asset in lock.assets.values():
        files = tuple(_with_digest(file, digests[file.path].sha256) for file in asset.files)
        configs = {
            config: {
                name: _with_footers(split, root, f"{asset.name}: {config}/{name}")
                for name, split in splits.items()
            }
            for config, splits in asset.configs.items()
        }
        if files != asset.files or configs != asset.configs:  # else its text is known already
            lock = lock.with_asset(replace(asset, files=files, configs=configs))
    return lock


def _with_digest(file: LockedFile, sha256: str) -> LockedFile:
    return file if file.sha256 == sha256 else replace(file, sha256=sha256)


def _with_footers(split: LockedSplit, root: Path, what: str) -> LockedSplit:
    """A split with the rows and the schema that the footers of its shards state.

    Raises:
        DamageError: a shard is no parquet file, shards differ in schema, or the card declares
            another number of rows.
    """
    footers = [parquet_footer(root / shard) for shard in split.shards]
    for shard, footer in zip(split.shards, footers, strict=True):
        if footer.schema != footers[0].schema:
            raise DamageError(
                f"{what}: {shard} has other columns than {split.shards[0]}.",
                "Try another revision.",
            )
    rows = sum(footer.rows for footer in footers)
    if split.declared_rows not in (None, rows):
        raise DamageError(
            f"{what}: {rows} rows in {human_count(len(footers), 'file')}; "
            f"the card says {split.declared_rows}.",
            "Files are missing from the repository, or its card is out of date: "
            "try another revision.",
        )
    return replace(split, rows=rows, schema=footers[0].schema)


T = TypeVar("T")
Progress = Callable[[int], None]
Pair = tuple[LockedAsset, LockedFile]


def fetch_manifest(
    manifest_path: Path,
    root: Path,
    *,
    endpoint: str | None,
    jobs: int,
    locked: bool,
    updates: Iterable[str],
    dry_run: bool,
    reporter: Reporter,
    allow_pickle: bool = False,
    offline_check: bool = True,
    store: SharedStore | None = None,
) -> FetchOutcome:
    """`stage fetch`: resolves or follows the lock, then makes `root` the bundle it describes.

    Args:
        store: the store of contents that bundles of this machine share; None: no store.

    Raises:
        StageError: exit code 1 bytes are not as announced, 2 a bad request, 3 policy, 5 run it
            again.
    """
    manifest, updates = replace(Manifest.load(manifest_path), output=root), set(updates)
    check_nesting(root, manifest)
    check_writable(root)
    with nullcontext() if dry_run else alone_in(root):
        folder = WorkFolder.inspect(root)
        folder.check_same_bundle(manifest)
        sources = Sources(
            endpoint,
            reporter,
            at_once=jobs,
            allow_pickle=allow_pickle,
            keep_locks=not dry_run,
        )
        previous = read_previous(manifest)
        check_space_for_local(
            root, look_at_local(manifest, previous, sources, updates), manifest, folder, store
        )
        resolution = resolve(manifest, previous, sources, reporter, updates=updates, locked=locked)
        if (unloadable := loads_by_name(manifest, resolution.lock)) is not None:
            if offline_check:
                raise unloadable
            reporter.warn(unloadable.message)
        if dry_run:
            given_up = folder.given_up({file.path for file in resolution.lock.files})
            return plan(
                resolution, root, folder, Sharing(store, root, reporter, given_up), reporter
            )
        fetching = _Fetch(resolution, root, folder, sources, jobs, reporter, offline_check, store)
        return fetching.run(previous)


def load_or_resolve(
    manifest_path: Path, sources: Sources, *, updates: Iterable[str], reporter: Reporter
) -> Resolution:
    """`stage lock`: resolves what the lock does not answer and writes the lock.

    Raises:
        StageError: as for `resolve`.
    """
    manifest, updates = Manifest.load(manifest_path), set(updates)
    previous = read_previous(manifest)
    look_at_local(manifest, previous, sources, updates)
    resolution = resolve(manifest, previous, sources, reporter, updates=updates)
    if (unloadable := loads_by_name(manifest, resolution.lock)) is not None:
        reporter.warn(str(unloadable))
    wrote = write_lock(resolution.lock, manifest, previous)
    reporter.note(f"{resolution.lock_path}: {'written' if wrote else 'unchanged'}")
    return resolution


def write_lock(lock: Lockfile, manifest: Manifest, previous: Lockfile | None) -> bool:
    """Writes the lock beside its manifest, unless the file has this text already.

    Returns:
        Whether it wrote.
    """
    if previous is not None and previous.to_json() == lock.to_json():
        return False
    write_atomically(manifest.lock_path, lock.to_json())
    return True


def _sealed(root: Path) -> tuple[bytes, bytes] | None:
    """The tag manifest and its signature; None if the bundle is not signed."""
    try:
        return (root / layout.TAG_MANIFEST).read_bytes(), (root / layout.SIGNATURE).read_bytes()
    except OSError:
        return None


class _Fetch:
    """One run of `stage fetch`, after resolving."""

    def __init__(
        self,
        resolution: Resolution,
        root: Path,
        folder: WorkFolder,
        sources: Sources,
        jobs: int,
        reporter: Reporter,
        offline_check: bool,
        store: SharedStore | None,
    ) -> None:
        self.manifest, self.lock = resolution.manifest, resolution.lock
        self.root, self.folder, self.sources, self.jobs, self.reporter = (
            root,
            folder,
            sources,
            jobs,
            reporter,
        )
        wanted = {file.path for file in self.lock.files}
        self.sharing = Sharing(store, root, reporter, folder.given_up(wanted))
        self.offline_check = offline_check
        self.digests: dict[str, FileDigests] = {}
        self.changed = resolution.changed
        self.previous: Lockfile | None = None
        self.on_disk: Lockfile | None = None  # the lock beside the manifest, as it is now

    def run(self, previous: Lockfile | None) -> FetchOutcome:
        """Checks the files that are here, fetches the others, and finishes the bundle.

        Args:
            previous: the lock that is beside the manifest.
        """
        self.previous = self.on_disk = previous
        self._write_pins()
        stale = self.folder.stale({file.path for file in self.lock.files})
        check_space(self.root, need(self.lock, self.folder, self.sharing).space)
        absent = self._absent()
        shared = self._take_shared([pair for pair in absent if self.sharing.has(pair[1])])
        absent = [(asset, file) for asset, file in absent if file.path not in shared]
        to_make = self._to_make(absent)
        if not absent and not to_make and not stale and self._is_finished():
            self.reporter.note(f"{self.root}: complete already; nothing to do")
        else:
            self._bring_and_finish(absent, to_make, stale)
        write_lock(self.lock, self.manifest, self.on_disk)
        self.sharing.keep(self.digests)
        return self._outcome(absent, to_make, shared)

    def _absent(self) -> list[Pair]:
        """Files that are missing or damaged. Hashes all files that are here."""
        files = [(asset, file) for asset in self.lock.assets.values() for file in asset.files]
        here = [pair for pair in files if self.folder.size_of(pair[1].path) == pair[1].size]
        absent = [pair for pair in files if self.folder.size_of(pair[1].path) != pair[1].size]
        if here:
            size = sum(file.size for _, file in here)
            self.reporter.note(
                f"checking {human_count(len(here), 'file')} ({human_size(size)}) already here"
            )
            damaged = self._each("check", here, self._check)
            absent += [pair for pair, is_damaged in zip(here, damaged, strict=True) if is_damaged]
        return absent

    def _outcome(
        self, absent: list[Pair], to_make: list[str], shared: dict[str, int]
    ) -> FetchOutcome:
        """The result, printed as well."""
        remade = [file for name in to_make for file in self.lock.assets[name].files if file.made_by]
        fetched = [file for _, file in absent if not file.made_by] + remade
        size = max(0, sum(file.size for file in fetched) - self.sources.taken_over)
        count = len(self.lock.files)
        self.reporter.note(
            f"{self.root}: {human_count(count, 'file')}, {human_size(self.lock.size)}, "
            f"{human_size(size)} fetched"
        )
        return FetchOutcome(
            self.root,
            self.manifest.lock_path,
            self.lock.id,
            count,
            self.lock.size,
            len(fetched),
            size,
            len(shared),
            sum(shared.values()),
            False,
        )

    def _take_shared(self, known: list[Pair]) -> dict[str, int]:
        """Takes files from the store; returns the path and size of each."""
        if not known:
            return {}
        self.folder.mark_unfinished({file.path for file in self.lock.files})
        came = self._each("store", known, self._take)
        taken = {
            file.path: file.size for (_, file), is_here in zip(known, came, strict=True) if is_here
        }
        self.sharing.report_taken()
        return taken

    def _take(self, asset: LockedAsset, file: LockedFile, progress: Progress) -> bool:
        digests = self.sharing.take(file, progress)
        if digests is not None:
            self.digests[file.path] = digests
        return digests is not None

    def _to_make(self, absent: list[tuple[LockedAsset, LockedFile]]) -> list[str]:
        """Names of assets whose converted files are missing, or were never made."""
        names = {asset.name for asset, file in absent if file.made_by}
        names |= {
            asset.name
            for asset in self.lock.assets.values()
            if asset.made_from and not was_made(asset)
        }
        for name in sorted(names):
            check_may_make(self.lock.assets[name], self.manifest, self.sources)
        return sorted(names)

    def _write_pins(self) -> None:
        """Writes the lock before the bundle is finished, without new pins of `path:` sources.

        Such a pin says what the bundle holds. A file that never entered a finished bundle (its
        conversion failed, for example) may be corrected: the next run takes it as it is then.
        """
        old = self.previous.assets if self.previous else {}
        held = {
            name
            for name, asset in self.lock.assets.items()
            if asset.source.type == "path" and name in self.changed
        }
        assets = {name: asset for name, asset in self.lock.assets.items() if name not in held}
        assets |= {name: old[name] for name in held if name in old}
        if assets:
            lock = replace(self.lock, assets=assets) if held else self.lock
            write_lock(lock, self.manifest, self.on_disk)
            self.on_disk = lock

    def _make(self, name: str) -> None:
        """Makes the files of an asset from its ingredients; pins digests that were unknown."""

        def pin(asset: LockedAsset) -> None:
            self.lock = self.lock.with_asset(asset)
            self._write_pins()

        asset = self.lock.assets[name]
        made, digests = build_asset(
            asset,
            self.root,
            self.folder,
            self.manifest,
            self.sources,
            self.reporter,
            pin,
            offline_check=self.offline_check,
        )
        self.digests.update(digests)
        self.lock = self.lock.with_asset(made)
        check_names(self.lock, self.manifest)

    def _bring_and_finish(
        self, absent: list[tuple[LockedAsset, LockedFile]], to_make: list[str], stale: list[str]
    ) -> None:
        sealed = _sealed(self.root)
        self.folder.mark_unfinished({file.path for file in self.lock.files})
        self._each("fetch", [pair for pair in absent if not pair[1].made_by], self._bring)
        mistakes = Mistakes()
        for name in to_make:
            with mistakes:
                self._make(name)
        mistakes.check(str(self.manifest.path))
        wanted = {file.path for file in self.lock.files}
        stale = [path for path in stale if path not in wanted]
        self.lock = completed(self.lock, self.digests, self.root)
        for path, digests in self.digests.items():
            self.reporter.detail(f"{path}: sha256 {digests.sha256}")
        if stale:
            size = human_size(sum(self.folder.size_of(path) or 0 for path in stale))
            files = f"{human_count(len(stale), 'file')} ({size})"
            self.reporter.note(
                f"{self.root}: removes {files} that {self.manifest.path} does not ask for"
            )
        self.folder.remove(stale)
        if self.offline_check:
            with self.reporter.at_work("load"):
                check_loads(self.root, self.lock, self.reporter)
        if not sync_disk(self.root):
            self.reporter.note("this system has no syncfs: each file was put on the disk by itself")
        layout.finish(self.root, self.lock, self.manifest.text, _facts(self.sources.endpoint))
        self._sign_as_before(sealed)

    def _sign_as_before(self, sealed: tuple[bytes, bytes] | None) -> None:
        """Restores the signature if the tag manifest is the same again, as after a repair."""
        if sealed is None:
            return
        tag_manifest, signature = sealed
        if (self.root / layout.TAG_MANIFEST).read_bytes() == tag_manifest:
            write_atomically(self.root / layout.SIGNATURE, signature)
        else:
            self.reporter.note(
                f"{self.root}: another bundle now, so not signed any more: "
                f"stage sign {self.root} --key KEY"
            )

    def _is_finished(self) -> bool:
        """Whether finishing the folder again would change nothing, tag files included."""
        if not (self.root / layout.TAG_MANIFEST).is_file() or not self.lock.is_complete:
            return False
        report = verify(self.root, "fast")
        if not report.ok or report.bundle_id != self.lock.id:
            return False
        return (self.root / layout.REQUEST).read_bytes() == self.manifest.text

    def _check(self, asset: LockedAsset, file: LockedFile, progress: Progress) -> bool:
        """Hashes a file that is here; True if it is damaged."""
        expected = file.expected
        digests = hash_file(self.root / file.path, git=expected.needs_git, progress=progress)
        if expected.mismatch(digests) is None:
            self.digests[file.path] = digests
            return False
        self.reporter.warn(f"{file.path}: here, but not as locked; fetching it again")
        return True

    def _bring(self, asset: LockedAsset, file: LockedFile, progress: Progress) -> None:
        target = self.root / file.path
        target.unlink(missing_ok=True)
        self.digests[file.path] = self.sources.bring(asset, file, self.manifest, target, progress)

    def _each(
        self,
        what: str,
        pairs: list[tuple[LockedAsset, LockedFile]],
        work: Callable[[LockedAsset, LockedFile, Progress], T],
    ) -> list[T]:
        """Runs `work` on every file, several at once, the largest first.

        Returns the results in the order of `pairs`.

        The first failure ends the others soon, and is the one that is raised.
        """
        with self.reporter.bytes_bar(what, sum(file.size for _, file in pairs)) as add:
            order = sorted(range(len(pairs)), key=lambda i: -pairs[i][1].size)
            results = together(lambda i: work(*pairs[i], add), order, self.jobs, self.sources.stop)
        done = dict(zip(order, results, strict=True))
        return [done[i] for i in range(len(pairs))]


def _facts(endpoint: str) -> list[tuple[str, str]]:
    """Facts of this fetch alone. They go into bag-info.txt, never into the lock."""
    return [
        ("Bagging-Date", datetime.now(timezone.utc).date().isoformat()),
        ("Bag-Software-Agent", f"airlift {__version__}"),
        ("Airlift-Endpoint", endpoint),
        ("Airlift-Host", platform.node() or "unknown"),
    ]
