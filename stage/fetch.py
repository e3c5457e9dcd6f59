"""Lock -> bundle: checks what is here, brings what is not, and finishes the folder last.

Every run does the same three things, whatever an earlier one left: hash the files that lie there already, bring the
missing and the damaged ones, write the tag files. Nothing needs to remember how far it got, so an interruption at any
moment leaves either a finished bundle or one that the same command goes on with.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import nullcontext
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from stage import __version__
from stage import bundle as layout
from stage.asset import LockedAsset, LockedFile
from stage.completion import completed
from stage.digest import FileDigests, hash_file
from stage.disk import check_space, human_count, human_size, require_writable, write_atomically
from stage.fetchplan import FetchOutcome, check_room_for_local, need, plan, was_made
from stage.loadcheck import require_loads
from stage.lockfile import Lockfile
from stage.making import check_may_make, make
from stage.manifest import Manifest
from stage.nesting import refuse_nesting
from stage.progress import Reporter
from stage.resolve import Resolution, check_names, loads_by_name, look_at_local, read_previous, resolve
from stage.sharing import Sharing
from stage.sources import Sources
from stage.sources.retry import Stopped
from stage.store import Store
from stage.verify import verify
from stage.workfolder import WorkFolder, alone_in

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
    max_rate: float | None = None,
    allow_pickle: bool = False,
    offline_check: bool = True,
    store: Store | None = None,
) -> FetchOutcome:
    """`stage fetch`: resolves or follows the lock, then makes `root` the bundle it describes.

    Args:
        store: where contents that this machine has already are looked for, and kept; None: nowhere.

    Raises:
        StageError: exit code 1 bytes that are not as announced, 2 a bad request, 3 policy, 5 run it again.
    """
    manifest, updates = Manifest.load(manifest_path), set(updates)
    refuse_nesting(root, manifest)
    require_writable(root)
    with nullcontext() if dry_run else alone_in(root):
        folder = WorkFolder.inspect(root)
        folder.require_same_bundle(manifest)
        sources = Sources(
            endpoint, reporter, at_once=jobs, max_rate=max_rate, allow_pickle=allow_pickle, keep_locks=not dry_run
        )
        previous = read_previous(manifest)
        check_room_for_local(root, look_at_local(manifest, previous, sources, updates), manifest, folder, store)
        resolution = resolve(manifest, previous, sources, reporter, updates=updates, locked=locked)
        if (unloadable := loads_by_name(manifest, resolution.lock)) is not None:
            if offline_check:
                raise unloadable
            reporter.warn(unloadable.message)
        if dry_run:
            given_up = folder.given_up({file.path for file in resolution.lock.files})
            return plan(resolution, root, folder, Sharing(store, root, reporter, given_up), reporter)
        write_lock(resolution.lock, manifest, previous)
        return _Fetch(resolution, root, folder, sources, jobs, reporter, offline_check, store).run(previous)


def load_or_resolve(manifest_path: Path, sources: Sources, *, updates: Iterable[str], reporter: Reporter) -> Resolution:
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
    """Writes the lock beside its manifest unless it says the same already; returns whether it wrote."""
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
        store: Store | None,
    ) -> None:
        self.manifest, self.lock = resolution.manifest, resolution.lock
        self.root, self.folder, self.sources, self.jobs, self.reporter = root, folder, sources, jobs, reporter
        wanted = {file.path for file in self.lock.files}
        self.sharing = Sharing(store, root, reporter, folder.given_up(wanted))
        self.offline_check = offline_check
        self.digests: dict[str, FileDigests] = {}

    def run(self, previous: Lockfile | None) -> FetchOutcome:
        """Checks, brings, finishes."""
        stale = self.folder.stale({file.path for file in self.lock.files})
        check_space(self.root, need(self.lock, self.folder, self.sharing).room)
        absent = self._absent()
        shared = self._take_shared([pair for pair in absent if self.sharing.has(pair[1])])
        absent = [(asset, file) for asset, file in absent if file.path not in shared]
        to_make = self._to_make(absent)
        if not absent and not to_make and not stale and self._is_finished():
            self.reporter.note(f"{self.root}: complete already; nothing to do")
        else:
            self._bring_and_finish(absent, to_make, stale)
            write_lock(self.lock, self.manifest, previous)
        self.sharing.keep(self.digests)
        return self._outcome(absent, to_make, shared)

    def _absent(self) -> list[Pair]:
        """What is not here, or not as it should be: everything else is hashed."""
        files = [(asset, file) for asset in self.lock.assets.values() for file in asset.files]
        here = [pair for pair in files if self.folder.size_of(pair[1].path) == pair[1].size]
        absent = [pair for pair in files if self.folder.size_of(pair[1].path) != pair[1].size]
        if here:
            size = sum(file.size for _, file in here)
            self.reporter.note(f"checking {human_count(len(here), 'file')} ({human_size(size)}) already here")
            damaged = self._each("check", here, self._check)
            absent += [pair for pair, is_damaged in zip(here, damaged, strict=True) if is_damaged]
        return absent

    def _outcome(self, absent: list[Pair], to_make: list[str], shared: dict[str, int]) -> FetchOutcome:
        """What came of it, also told."""
        remade = [file for name in to_make for file in self.lock.assets[name].files if file.made_by]
        fetched = [file for _, file in absent if not file.made_by] + remade
        size = max(0, sum(file.size for file in fetched) - self.sources.taken_over)
        count = len(self.lock.files)
        self.reporter.note(
            f"{self.root}: {human_count(count, 'file')}, {human_size(self.lock.size)}, {human_size(size)} fetched"
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
        """Brings what the store has; path and size of what came so."""
        if not known:
            return {}
        self.folder.mark_unfinished({file.path for file in self.lock.files})
        came = self._each("store", known, self._take)
        taken = {file.path: file.size for (_, file), is_here in zip(known, came, strict=True) if is_here}
        self.sharing.report_taken()
        return taken

    def _take(self, asset: LockedAsset, file: LockedFile, progress: Progress) -> bool:
        digests = self.sharing.take(file, partial(_is_as_locked, file=file), progress)
        if digests is not None:
            self.digests[file.path] = digests
        return digests is not None

    def _to_make(self, absent: list[tuple[LockedAsset, LockedFile]]) -> list[str]:
        """Assets with files that are made here and are not here, or were never made."""
        names = {asset.name for asset, file in absent if file.made_by}
        names |= {asset.name for asset in self.lock.assets.values() if asset.made_from and not was_made(asset)}
        for name in sorted(names):
            check_may_make(self.lock.assets[name], self.manifest, self.sources)
        return sorted(names)

    def _make(self, name: str) -> None:
        """Makes an asset's files out of what it is made from, and pins what was not known before."""

        def pin(asset: LockedAsset) -> None:
            before = self.lock
            self.lock = self.lock.with_asset(asset)
            write_lock(self.lock, self.manifest, before)

        asset = self.lock.assets[name]
        made, digests = make(asset, self.root, self.folder, self.manifest, self.sources, self.reporter, pin)
        self.digests.update(digests)
        self.lock = self.lock.with_asset(made)
        check_names(self.lock, self.manifest)

    def _bring_and_finish(
        self, absent: list[tuple[LockedAsset, LockedFile]], to_make: list[str], stale: list[str]
    ) -> None:
        sealed = _sealed(self.root)
        self.folder.mark_unfinished({file.path for file in self.lock.files})
        self._each("fetch", [pair for pair in absent if not pair[1].made_by], self._bring)
        for name in to_make:
            self._make(name)
        wanted = {file.path for file in self.lock.files}
        stale = [path for path in stale if path not in wanted]
        self.lock = completed(self.lock, self.digests, self.root)
        for path, digests in self.digests.items():
            if digests.blocks:
                layout.write_blocks(self.root, digests.sha256, digests.blocks)
            self.reporter.detail(f"{path}: sha256 {digests.sha256}")
        if stale:
            size = human_size(sum(self.folder.size_of(path) or 0 for path in stale))
            files = f"{human_count(len(stale), 'file')} ({size})"
            self.reporter.note(f"{self.root}: removes {files} that {self.manifest.path} does not ask for")
        self.folder.remove([*stale, *self.folder.stale_blocks(layout.tag_paths(self.lock))])
        if self.offline_check:
            with self.reporter.at_work("load"):
                require_loads(self.root, self.lock, self.reporter)
        layout.finish(self.root, self.lock, self.manifest.text, _facts(self.sources.endpoint))
        self._sign_as_before(sealed)

    def _sign_as_before(self, sealed: tuple[bytes, bytes] | None) -> None:
        """A signature is of the tag manifest: what was only mended has the same one again, and is signed as it was."""
        if sealed is None:
            return
        tag_manifest, signature = sealed
        if (self.root / layout.TAG_MANIFEST).read_bytes() == tag_manifest:
            write_atomically(self.root / layout.SIGNATURE, signature)
        else:
            self.reporter.note(
                f"{self.root}: another bundle now, so not signed any more: stage sign {self.root} --key KEY"
            )

    def _is_finished(self) -> bool:
        """Whether the folder is, tag files included, just what finishing it again would make."""
        if not (self.root / layout.TAG_MANIFEST).is_file() or not self.lock.is_complete:
            return False
        report = verify(self.root, "fast")
        if not report.ok or report.bundle_id != self.lock.id:
            return False
        return (self.root / layout.REQUEST).read_bytes() == self.manifest.text

    def _check(self, asset: LockedAsset, file: LockedFile, progress: Progress) -> bool:
        """Hashes a file that is here; True if it is damaged."""
        digests = hash_file(self.root / file.path, git=_wants_git(file), progress=progress)
        if _is_as_locked(digests, file):
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
        """Runs `work` on every file, several at once, the largest first; results in the order given.

        The first failure ends the others soon, and is the one that is raised.
        """
        with self.reporter.bytes_bar(what, sum(file.size for _, file in pairs)) as add:
            pool, waited = ThreadPoolExecutor(max_workers=self.jobs), False
            order = sorted(range(len(pairs)), key=lambda i: -pairs[i][1].size)
            futures: dict[int, Future[T]] = {i: pool.submit(work, *pairs[i], add) for i in order}
            try:
                wait(futures.values(), return_when=FIRST_EXCEPTION)
                waited = True
            finally:
                if any(not f.done() or f.cancelled() or f.exception() for f in futures.values()):
                    self.sources.stop()
                # Ctrl-C waits for no server that says nothing: what came is on the disk, and the process ends.
                pool.shutdown(wait=waited, cancel_futures=True)
            _raise_first(futures.values())
            return [futures[i].result() for i in range(len(pairs))]


def _raise_first(futures: Iterable[Future[Any]]) -> None:
    errors = [error for f in futures if f.done() and not f.cancelled() and (error := f.exception())]
    for error in errors:
        if not isinstance(error, Stopped):
            raise error
    if errors:
        raise KeyboardInterrupt


def _wants_git(file: LockedFile) -> bool:
    return file.upstream is not None and file.upstream.algorithm == "git-sha1"


def _is_as_locked(digests: FileDigests, file: LockedFile) -> bool:
    if digests.size != file.size or file.sha256 not in (None, digests.sha256):
        return False
    return file.upstream is None or digests.matches(file.upstream)


def _facts(endpoint: str) -> list[tuple[str, str]]:
    """What is true of this fetch and of no other: kept in bag-info.txt, out of the lock."""
    return [
        ("Bagging-Date", datetime.now(timezone.utc).date().isoformat()),
        ("Bag-Software-Agent", f"airlift {__version__}"),
        ("Airlift-Endpoint", endpoint),
        ("Airlift-Host", platform.node() or "unknown"),
    ]
