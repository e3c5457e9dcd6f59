"""The folder of a fetch, and the store from which files come into it without a download.

A fetch deletes files that an earlier manifest asked for and this one does not. So it must
distinguish its own files from a user's. Its own are those that the folder's lock or the journal of
an interrupted fetch names, and partial files. Any other file stops the fetch before it uses the
network.

The shared store has contents that several bundles on one machine have in common, once on its disk.
`sha256/ab/abcd...` is a content. Nothing counts who uses it: a hard link in a bundle is another
name of it, and the docs say how to delete files that have only one.

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
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from stage.bundle.bundle import (
    FETCH_PARTIAL,
    LOCK,
    MANIFEST,
    SEAL,
    SIGNATURE,
    TAG_FILES,
    TAG_MANIFEST,
    check_is_bundle,
    parse_manifest,
)
from stage.errors import IncompleteError, StageError, UsageError, quoted
from stage.files import (
    FileDigests,
    MismatchError,
    human_count,
    human_size,
    join_limited,
    make_folder,
)
from stage.lock.manifest import Manifest
from stage.lock.model import LockedFile, Lockfile, read_lock
from stage.paths import PARTIAL_SUFFIX, printable
from stage.progress import Reporter

_SHOWN = 10  # names in one line
# The folder inside a bundle where a fetch or an apply builds files before they get their places: it
# is on the same disk, so a rename moves them.
WORKSHOP = "workshop.partial"
_OURS = {*TAG_FILES, *SEAL, FETCH_PARTIAL}


@contextmanager
def alone_in(root: Path) -> Iterator[None]:
    """Lets one command write into a folder. Makes it; removes what it made and is empty at the end.

    The lock (flock on the folder) ends with the process. On file systems without locks (some
    network disks) the fetch continues without.

    Raises:
        IncompleteError: another command writes there.
    """
    if root.exists() and not root.is_dir():
        yield  # `WorkFolder.inspect` raises
        return
    new = [folder for folder in (root, *root.parents) if not folder.exists()]
    make_folder(root)
    descriptor = os.open(root, os.O_RDONLY)
    try:
        # Without a wait: the other command may run for hours, and then there is nothing left to do.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise IncompleteError(
            f"{root}: another `stage fetch` or `stage apply` is running in this folder.",
            "Wait until it has ended, then run again.",
        ) from None
    except OSError:  # no locks there
        pass
    try:
        yield
    finally:
        with suppress(OSError):  # most often: it is not empty
            for folder in new:
                folder.rmdir()
        os.close(descriptor)


@dataclass(frozen=True)
class WorkFolder:
    """A bundle's folder before a fetch.

    Attributes:
        sizes: bytes of each file in it, by path.
        ours: payload paths that an earlier fetch wrote or was going to write.
        lock: of the bundle in it, if it can be read.
    """

    root: Path
    sizes: Mapping[str, int] = field(default_factory=dict)
    ours: frozenset[str] = frozenset()
    lock: Lockfile | None = None

    @staticmethod
    def inspect(root: Path) -> WorkFolder:
        """Looks at a folder that may not exist yet.

        Raises:
            UsageError: it is a file, has links in it, or is a folder of something else.
        """
        if not root.exists():
            return WorkFolder(root)
        if not root.is_dir():
            raise UsageError(f"{root}: is a file; a bundle is a folder.", "Choose another -o.")
        if any(root.iterdir()):
            try:
                check_is_bundle(root)
            except UsageError:
                raise UsageError(
                    f"{root}: is not empty and not a bundle; nothing was changed.",
                    "Choose a new folder with -o.",
                ) from None
        lock = lock_in(root)
        return WorkFolder(root, _sizes(root), _known_paths(root, lock), lock)

    def check_same_bundle(self, manifest: Manifest) -> None:
        """Raises if the folder holds a bundle of another name: the -o may be a mistake.

        Raises:
            UsageError: it does.
        """
        if self.lock is None or self.lock.name == manifest.name:
            return
        beside = quoted(self.root.parent / manifest.name)
        raise UsageError(
            f"{self.root}: another bundle is here: {printable(self.lock.name)}; {manifest.path} "
            f"makes {printable(manifest.name)}. Nothing was changed.",
            f"Give it a folder of its own: stage fetch {quoted(manifest.path)} -o {beside}   "
            "(to make this "
            f"bundle that one: write `name: {self.lock.name}` in {manifest.path}, or remove the "
            "folder)",
        )

    def present(self, lock: Lockfile) -> set[str]:
        """The paths of files of a lock that are here with their size; no byte is read."""
        return {file.path for file in lock.files if self.sizes.get(file.path) == file.size}

    @property
    def partial_size(self) -> int:
        """Bytes that interrupted downloads left."""
        return sum(size for path, size in self.sizes.items() if _is_unfinished(path))

    def stale(self, wanted: set[str]) -> list[str]:
        """Payload files of ours that `wanted` does not name any more.

        Raises:
            UsageError: there are files in the folder that no fetch wrote.
        """
        stale: list[str] = []
        foreign: list[str] = []
        for path in self.sizes:
            if path in wanted or path in _OURS or _is_unfinished(path):
                continue
            (stale if path in self.ours else foreign).append(path)
        if foreign:
            names = join_limited([printable(path) for path in foreign], _SHOWN)
            raise UsageError(
                f"{self.root}: `stage fetch` did not put these here: {names}.",
                "Move that out of the folder, then run again.",
            )
        return stale

    def unwanted(self, wanted: set[str]) -> list[LockedFile]:
        """Files of the earlier bundle here, as its lock has them, that `wanted` does not name."""
        files = self.lock.files if self.lock else ()
        return [
            file
            for file in files
            if file.path not in wanted and self.sizes.get(file.path) == file.size
        ]

    def mark_unfinished(self, paths: set[str]) -> None:
        """Removes the seal and records which files will be ours. Call it before any change."""
        self.root.mkdir(parents=True, exist_ok=True)
        with open(self.root / FETCH_PARTIAL, "a", encoding="utf-8") as journal:
            journal.writelines(f"{path}\n" for path in sorted(paths))
            journal.flush()
            os.fsync(journal.fileno())
        (self.root / TAG_MANIFEST).unlink(missing_ok=True)
        (self.root / SIGNATURE).unlink(missing_ok=True)

    def put(self, path: str, built: Path) -> None:
        """Moves a file that was built on the same disk to its path in the bundle."""
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        built.replace(self.root / path)

    def drop(self, paths: Iterable[str]) -> None:
        """Deletes files of ours, and all folders that are empty then."""
        for path in paths:
            (self.root / path).unlink(missing_ok=True)
        # Backwards: a folder comes after those inside it, and is empty once these are removed.
        for folder, _, _ in sorted(os.walk(self.root), reverse=True):
            if folder != str(self.root) and not any(Path(folder).iterdir()):
                Path(folder).rmdir()

    def clear(self, paths: Iterable[str]) -> None:
        """Deletes files of ours, the workshop, and partial files."""
        if (self.root / WORKSHOP).is_dir():
            shutil.rmtree(self.root / WORKSHOP)
        partial = [
            p.relative_to(self.root).as_posix() for p in self.root.rglob(f"*{PARTIAL_SUFFIX}")
        ]
        self.drop({*paths, *partial} - {FETCH_PARTIAL})


def _is_unfinished(path: str) -> bool:
    return path.endswith(PARTIAL_SUFFIX) or path.startswith(f"{WORKSHOP}/")


def _sizes(root: Path) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for folder, folders, files in os.walk(root):
        for name in [*folders, *files]:
            path = Path(folder, name)
            status = path.lstat()
            if stat.S_ISREG(status.st_mode):
                sizes[path.relative_to(root).as_posix()] = status.st_size
            elif (
                not stat.S_ISDIR(status.st_mode)
                and WORKSHOP not in path.relative_to(root).parts[:1]
            ):
                raise UsageError(
                    f"{path}: a link or special file inside a bundle.",
                    "Remove it (a bundle holds regular files only).",
                )
    return sizes


def lock_in(root: Path) -> Lockfile | None:
    """The lock of a bundle, finished or not; None if it is missing or cannot be read."""
    path = root / LOCK
    try:
        return read_lock(path.read_bytes(), str(path)) if path.is_file() else None
    except StageError:
        return None


def _known_paths(root: Path, lock: Lockfile | None) -> frozenset[str]:
    """Payload paths that an earlier fetch into this folder wrote or was going to write."""
    known = {file.path for file in lock.files} if lock else set()
    manifest, journal = root / MANIFEST, root / FETCH_PARTIAL
    if lock is None and (root / LOCK).is_file() and manifest.is_file():
        known |= set(parse_manifest(manifest.read_bytes()))  # a damaged lock names nothing
    if journal.is_file():
        known |= set(journal.read_text(encoding="utf-8", errors="replace").splitlines())
    return frozenset(known)


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
