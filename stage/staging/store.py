"""The shared store: contents that several bundles on one machine have in common, once on its disk.

`sha256/ab/abcd...` is a content. Nothing here counts who uses it: a hard link in a bundle is
another name of it, and the docs say how to delete files that have only one.

Files are shared by reflink where the file system has reflinks; then bundles stay independent.
Otherwise they are hard links: bundle and store are one file. It is made read-only, and an edit in
place would change every bundle that has it. So each file that is taken is hashed under a `.partial`
name before it gets its own name.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from stage.digests import FileDigests, MismatchError
from stage.errors import UsageError, quoted
from stage.files import human_count, human_size
from stage.lock.model import LockedFile
from stage.paths import PARTIAL_SUFFIX
from stage.progress import Reporter

# Bytes. Smaller files save no space, and people edit them (config.json).
SHARED_FROM = 2**20
_FICLONE = 0x40049409  # linux/fs.h: another file on the same blocks, copied on write


@dataclass(frozen=True)
class SharedStore:
    """Where contents are on this machine, for several fetches at once: entries never change.

    Args:
        root: the store.
        hub_cache: the cache of huggingface_hub; its files are taken too if their names, a sha256,
            are right.
    """

    root: Path
    hub_cache: Path | None = None

    def entry(self, sha256: str) -> Path:
        """The path of the content with that digest; it may not exist."""
        return self.root / "sha256" / sha256[:2] / sha256

    @cached_property
    def blobs(self) -> dict[str, Path]:
        """The files of the cache of huggingface_hub, by name."""
        found = self.hub_cache.glob("*/blobs/*") if self.hub_cache else ()
        return {path.name: path for path in found if not path.is_symlink()}

    def sizes(self) -> set[int]:
        """The size in bytes of each content, for callers that know no digests yet."""
        entries = [*self.root.glob("sha256/*/*"), *self.blobs.values()]
        return {path.lstat().st_size for path in entries}

    def shares_disk_with(self, folder: Path) -> bool:
        """Whether files here and there can be the same bytes on one disk."""
        return _disk_of(self.root) == _disk_of(folder)


def store_from(environ: Mapping[str, str]) -> SharedStore | None:
    """The store of `$AIRLIFT_STORE` (`none`: no store), else that in the user's cache folder.

    Raises:
        UsageError: a path that depends on where the command runs.
    """
    named = environ.get("AIRLIFT_STORE", "")
    if named == "none":
        return None
    if named and not Path(named).is_absolute():
        raise UsageError(
            f"AIRLIFT_STORE={named}: should be an absolute path, or `none`.",
            f"AIRLIFT_STORE={Path(named).absolute()}",
        )
    cache = Path(environ.get("XDG_CACHE_HOME", ""))
    if not cache.is_absolute():  # the XDG specification ignores relative and empty ones
        cache = Path(environ.get("HOME", ""), ".cache")
    hub = environ.get("HF_HUB_CACHE") or Path(
        environ.get("HF_HOME") or cache / "huggingface", "hub"
    )
    root = Path(named) if named else cache / "airlift/store"
    return SharedStore(root, Path(hub)) if root.is_absolute() else None


def clearing(store: SharedStore | None, folder: Path) -> str:
    """What clears the store, for a remedy; empty where that frees nothing for a folder."""
    if store is None or not store.root.is_dir() or not store.shares_disk_with(folder):
        return ""
    find = f"find {quoted(store.root)} -type f -links 1 -delete"
    return f" (files of the shared store that no bundle on that disk has: `{find}`)"


class Sharing:
    """The use of all local contents by one fetch.

    Args:
        store: None: nothing is shared with other bundles.
        root: the bundle.
        given_up: files of an earlier state of the bundle that are in it and will be removed.
    """

    def __init__(
        self,
        store: SharedStore | None,
        root: Path,
        reporter: Reporter,
        given_up: Iterable[LockedFile] = (),
    ) -> None:
        self._store, self._root, self._reporter = store, root, reporter
        self._given_up = {
            digest: root / file.path for file in given_up for digest in _digests(file)
        }
        self._taken: dict[str, list[int]] = {}

    def _copies(self, file: LockedFile) -> Iterator[tuple[Path, str]]:
        """Local files that claim to be this file, and where they are."""
        digests = _digests(file)
        for digest in digests:
            if digest in self._given_up:
                yield self._given_up[digest], "in this bundle, under another name"
        sha256 = dict(digests).get("sha256")
        if self._store is None or file.size < SHARED_FROM or sha256 is None:
            return
        entry = self._store.entry(sha256)
        if entry.is_file() and not entry.is_symlink():
            yield entry, f"in the store {self._store.root}"
        blob = self._store.blobs.get(sha256)
        if blob is not None:
            yield blob, f"in the cache {self._store.hub_cache}"

    def has(self, file: LockedFile) -> bool:
        """Whether a local file has the digest of this file in its name."""
        return any(True for _ in self._copies(file))

    def is_free(self, file: LockedFile) -> bool:
        """Whether the file needs no space on the disk."""
        disk = _disk_of(self._root)
        copies = (path for path, _ in self._copies(file) if self._may_link(path))
        return any(_disk_of(path) == disk for path in copies)

    def _is_stored(self, path: Path) -> bool:
        return self._store is not None and self._store.root in path.parents

    def _may_link(self, path: Path) -> bool:
        """Whether a local copy is in the store or in this bundle: other owners may write to it."""
        return self._is_stored(path) or self._root in path.parents

    def take(self, file: LockedFile, progress: Callable[[int], None]) -> FileDigests | None:
        """Puts a local file into the bundle, and hashes it before it has its name there.

        Returns:
            Its digests; None if no local file has them.

        Raises:
            OSError: the disk of the bundle is full or cannot be written.
        """
        target = self._root / file.path
        target.parent.mkdir(parents=True, exist_ok=True)
        # Not a name that a download would resume.
        partial = target.with_name(f"store-{os.getpid()}-{threading.get_ident()}{PARTIAL_SUFFIX}")
        try:
            for source, where in self._copies(file):
                try:
                    if not _share(source, partial, link=self._may_link(source)):
                        shutil.copyfile(source, partial)
                except (FileNotFoundError, PermissionError) as error:
                    if error.filename == str(source):  # gone since, or another user's
                        continue
                    raise
                try:
                    digests = file.expected.verify(partial, progress)
                except MismatchError as error:
                    progress(-error.found.size)
                    partial.unlink()
                    self._drop(file, source, error.found)
                    continue
                # A rename onto another name of the same file does nothing (rename(2)).
                target.unlink(missing_ok=True)
                partial.replace(target)
                self._taken.setdefault(where, []).append(digests.size)
                return digests
        finally:
            partial.unlink(missing_ok=True)
        return None

    def _drop(self, file: LockedFile, source: Path, digests: FileDigests) -> None:
        """Removes a damaged content from the store; other copies belong to other programs."""
        if not self._is_stored(source):
            return
        others = ""
        if source.lstat().st_nlink > 1:
            others = (
                " Bundles on this disk share that file and its damage: run `stage verify` on each."
            )
        source.unlink()
        self._reporter.warn(
            f"{file.path}: the store's copy is damaged (its sha256 is {digests.sha256}); it is "
            f"dropped from the store and the file is fetched again.{others}"
        )

    def report_taken(self) -> None:
        """Prints which files were here already, and where."""
        for where, sizes in self._taken.items():
            were = "was" if len(sizes) == 1 else "were"
            self._reporter.note(
                f"{human_count(len(sizes), 'file')} ({human_size(sum(sizes))}) {were} "
                f"here already, {where}"
            )

    def keep(self, digests: Mapping[str, FileDigests]) -> None:
        """Shares this bundle's files with later bundles. A store that is read-only is no error.

        Args:
            digests: path in the bundle -> its digests, just computed.
        """
        if self._store is None:
            return
        sizes = []
        try:
            for path, known in digests.items():
                entry = self._store.entry(known.sha256)
                if known.size < SHARED_FROM or entry.exists():
                    continue
                if not _add(self._root / path, entry):
                    self._reporter.note(
                        f"not shared with later bundles: the store {self._store.root} is on "
                        "another disk (AIRLIFT_STORE=FOLDER names one on this disk)"
                    )
                    break
                sizes.append(known.size)
        except OSError as error:
            self._reporter.warn(
                f"{error.filename or self._store.root}: {error.strerror}; not kept in the store"
            )
        if sizes:
            self._reporter.note(
                f"{human_count(len(sizes), 'file')} ({human_size(sum(sizes))}) shared with later "
                f"bundles, on disk once: store {self._store.root}"
            )


def _digests(file: LockedFile) -> list[tuple[str, str]]:
    """The digests of a locked file, as algorithm and value: a Hub's LFS digest is a sha256."""
    evidence = file.expected.evidence
    return [(digest.algorithm.removeprefix("lfs-"), digest.value) for digest in evidence]


def _disk_of(path: Path) -> int:
    """The number of the disk of a file that may not exist yet."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path.stat().st_dev


def _add(path: Path, entry: Path) -> bool:
    """Makes a content of the store; False if that needs a copy.

    Raises:
        OSError: the store cannot be written.
    """
    entry.parent.mkdir(parents=True, exist_ok=True)
    partial = entry.with_name(f"{entry.name}{PARTIAL_SUFFIX}")  # one name: no kill leaves a second
    try:
        if not _share(path, partial):
            return False
        partial.chmod(stat.S_IMODE(partial.stat().st_mode) & ~0o222)
        partial.replace(entry)
    except FileNotFoundError:
        return entry.exists()  # another fetch added the same content meanwhile
    finally:
        partial.unlink(missing_ok=True)
    return True


def _share(source: Path, target: Path, *, link: bool = True) -> bool:
    """Makes `target` a reflink, else if `link` a hard link; False if neither is possible."""
    target.unlink(missing_ok=True)
    with suppress(OSError), open(source, "rb") as reader, open(target, "xb") as writer:
        fcntl.ioctl(writer.fileno(), _FICLONE, reader.fileno())
        os.fsync(writer.fileno())
        return True
    target.unlink(missing_ok=True)
    with suppress(OSError):  # another disk, no hard links there, too many of them, or gone
        if (
            link and source.lstat().st_uid == os.geteuid()
        ):  # another user may change it after the check
            os.link(source, target, follow_symlinks=False)
            return True
    return False
