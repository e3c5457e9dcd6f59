"""The shared store: contents that several bundles on one machine have in common, once on its disk.

`take` puts a content of the store into a bundle without the network. `keep` shares a file of a
bundle with later bundles. `sha256/ab/abcd...` is a content. `git-sha1/12/12ef...` is a link to a
content, named by the only digest that a Hub publishes of a small file. Nothing here counts who
uses a content: a hard link in a bundle is another name of it, and the docs say how to delete files
that have only one.

Files are shared by reflink where the file system has reflinks; then bundles stay independent.
Otherwise they are hard links: bundle and store are one file. It is made read-only, and an edit in
place would change every bundle that has it. So each file that is taken is hashed under a `.partial`
name before it gets its own name.

`Sharing` is the use of all local contents by one fetch: of the store, and of files of the bundle
under names that it gives up.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import stat
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from stage.digests import FileDigests, hash_file
from stage.errors import UsageError
from stage.files import human_count, human_size, sync_folder
from stage.lock.model import LockedFile
from stage.paths import PARTIAL_SUFFIX
from stage.progress import Reporter

# Bytes. Smaller files save no space, and people edit them (config.json).
SHARED_FROM = 2**20
CONTENTS, BY_GIT = "sha256", "git-sha1"
_FICLONE = 0x40049409  # linux/fs.h: another file on the same blocks, copied on write

Progress = Callable[[int], None]


def store_from(environ: Mapping[str, str]) -> SharedStore | None:
    """The store of `$AIRLIFT_STORE` (`none`: no store), else that in the user's cache folder.

    Raises:
        UsageError: a path that depends on where the command runs.
    """
    if named := environ.get("AIRLIFT_STORE"):
        if named == "none":
            return None
        if not Path(named).is_absolute():
            raise UsageError(
                f"AIRLIFT_STORE={named}: should be an absolute path, or `none`.",
                f"AIRLIFT_STORE={Path(named).absolute()}",
            )
        return SharedStore(Path(named))
    cache = environ.get("XDG_CACHE_HOME", "")
    if not Path(cache).is_absolute():  # the XDG specification ignores relative and empty ones
        home = environ.get("HOME", "")
        if not Path(home).is_absolute():
            return None
        cache = f"{home}/.cache"
    return SharedStore(Path(cache, "airlift", "store"))


class Kept(Enum):
    """What became of a file that was offered to the store."""

    NEW = "new"
    AS_BEFORE = "as before"  # there already, or too small
    APART = "apart"  # on another disk, where it could only be copied


@dataclass(frozen=True)
class Damaged:
    """A damaged content, which was removed from the store.

    Attributes:
        found: its sha256.
        in_bundles: whether bundles share it by hard link, and so have the damage too.
    """

    found: str
    in_bundles: bool


@dataclass(frozen=True)
class SharedStore:
    """A folder of contents by digest, for several fetches at once: entries never change."""

    root: Path

    def entry(self, sha256: str) -> Path:
        """The path of the content with that digest; it may not exist."""
        return self.root / CONTENTS / sha256[:2] / sha256

    def find(self, file: LockedFile) -> Path | None:
        """The entry that claims to be a locked file."""
        if file.size < SHARED_FROM:
            return None
        known = file.sha256
        if known is None and file.upstream is not None:
            git = file.upstream.algorithm == "git-sha1"
            known = self._sha256_of_git(file.upstream.value) if git else file.upstream.value
        if known is None:
            return None
        entry = self.entry(known)
        return entry if entry.is_file() and not entry.is_symlink() else None

    def _sha256_of_git(self, git_sha1: str) -> str | None:
        try:
            return self._git_entry(git_sha1).readlink().name
        except OSError:
            return None

    def _git_entry(self, git_sha1: str) -> Path:
        return self.root / BY_GIT / git_sha1[:2] / git_sha1

    def sizes(self) -> set[int]:
        """The size in bytes of each content, for callers that know no digests yet."""
        return {path.lstat().st_size for path in (self.root / CONTENTS).glob("*/*")}

    def shares_disk_with(self, folder: Path) -> bool:
        """Whether files here and there can be the same bytes on one disk."""
        try:
            return _nearest(self.root).stat().st_dev == _nearest(folder).stat().st_dev
        except OSError:
            return False

    def take(
        self,
        file: LockedFile,
        target: Path,
        is_right: Callable[[FileDigests], bool],
        progress: Progress,
    ) -> FileDigests | Damaged | None:
        """Puts a content into a bundle, and hashes it before it has its name there.

        Args:
            is_right: whether digests are those of the locked file; they include the git blob id if
                the lock has only that.

        Returns:
            Its digests; None if it is not here; `Damaged` if it is damaged.

        Raises:
            OSError: the disk of `target` is full or cannot be written.
        """
        entry = self.find(file)
        brought = (
            place_verified(entry, file, target, is_right, progress) if entry is not None else None
        )
        if entry is None or brought is None:
            return None
        digests, right = brought
        if right:
            return digests
        in_bundles = entry.lstat().st_nlink > 1
        entry.unlink(missing_ok=True)
        return Damaged(digests.sha256, in_bundles)

    def keep(self, path: Path, digests: FileDigests) -> Kept:
        """Shares a file of a bundle, whose digests were just computed, with later bundles.

        Raises:
            OSError: the store cannot be written.
        """
        if digests.size < SHARED_FROM:
            return Kept.AS_BEFORE
        entry = self.entry(digests.sha256)
        is_new = not entry.exists()
        if is_new and not self._add(path, entry):
            return Kept.APART
        if digests.git_sha1 is not None and self._sha256_of_git(digests.git_sha1) != digests.sha256:
            self._note_git(digests.git_sha1, digests.sha256)
        return Kept.NEW if is_new else Kept.AS_BEFORE

    @staticmethod
    def _add(path: Path, entry: Path) -> bool:
        entry.parent.mkdir(parents=True, exist_ok=True)
        partial = _partial(entry)
        try:
            if not _share(path, partial):
                return False
            partial.chmod(stat.S_IMODE(partial.stat().st_mode) & ~0o222)
            partial.replace(entry)
        finally:
            partial.unlink(missing_ok=True)
        return True

    def _note_git(self, git_sha1: str, sha256: str) -> None:
        link = self._git_entry(git_sha1)
        link.parent.mkdir(parents=True, exist_ok=True)
        partial = _partial(link)
        partial.unlink(missing_ok=True)
        partial.symlink_to(f"../../{CONTENTS}/{sha256[:2]}/{sha256}")
        partial.replace(link)


def place_verified(
    source: Path,
    file: LockedFile,
    target: Path,
    is_right: Callable[[FileDigests], bool],
    progress: Progress,
) -> tuple[FileDigests, bool] | None:
    """Shares or copies a local file, and hashes it before it has its name.

    Returns:
        Its digests, and whether they are right: only then it is in place. None if the source is
        gone.

    Raises:
        OSError: the disk of `target` is full or cannot be written.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = _partial(target)  # not a name that a download would resume
    try:
        if not _share(source, partial) and not _copied(source, partial):
            return None
        git = file.upstream is not None and file.upstream.algorithm == "git-sha1"
        digests = hash_file(partial, git=git, progress=progress)
        if not is_right(digests):
            progress(-digests.size)
            return digests, False
        # A rename onto another name of the same file does nothing (rename(2)).
        target.unlink(missing_ok=True)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    sync_folder(target.parent)
    return digests, True


def describe_damage(what: str, damaged: Damaged) -> str:
    """The warning about a damaged content of the store."""
    others = (
        " Bundles on this disk share that file and its damage: run `stage verify` on each."
        if damaged.in_bundles
        else ""
    )
    return (
        f"{what}: the store's copy is damaged (its sha256 is {damaged.found}); it is dropped from "
        f"the store and the file is fetched again.{others}"
    )


def _nearest(path: Path) -> Path:
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def _partial(target: Path) -> Path:
    name = hashlib.sha256(target.name.encode()).hexdigest()[:32]  # as short as names may have to be
    return target.with_name(f"store-{name}-{os.getpid()}-{threading.get_ident()}{PARTIAL_SUFFIX}")


def _share(source: Path, target: Path) -> bool:
    """Makes `target` a reflink, else a hard link; False if neither is possible."""
    target.unlink(missing_ok=True)
    if _reflink(source, target):
        return True
    status = source.lstat()
    if status.st_uid != os.geteuid():  # another user may change it after the check
        return False
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # another disk, no hard links there, too many of them, or gone
        return False
    return True


def _reflink(source: Path, target: Path) -> bool:
    try:
        with open(source, "rb", buffering=0) as reader, open(target, "xb", buffering=0) as writer:
            fcntl.ioctl(writer.fileno(), _FICLONE, reader.fileno())
            os.fsync(writer.fileno())
    except OSError:
        target.unlink(missing_ok=True)
        return False
    return True


def _copied(source: Path, target: Path) -> bool:
    """Copies a file; False if the source is gone.

    Raises:
        OSError: there is no space.
    """
    if not source.is_file():
        return False
    with open(source, "rb") as reader, open(target, "xb") as writer:
        shutil.copyfileobj(reader, writer, 2**22)
        writer.flush()
        os.fsync(writer.fileno())
    return True


class Sharing:
    """The use of local contents by one fetch.

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
        self._one_disk = store is not None and store.shares_disk_with(root)
        self._given_up = {
            digest: root / file.path for file in given_up for digest in _digests(file)
        }
        self._taken: dict[str, list[int]] = {}

    def has(self, file: LockedFile) -> bool:
        """Whether a local file has the digest of this file in its name."""
        return self._own(file) is not None or (
            self._store is not None and self._store.find(file) is not None
        )

    def is_free(self, file: LockedFile) -> bool:
        """Whether the file needs no space on the disk."""
        return self._own(file) is not None or (self._one_disk and self.has(file))

    def _own(self, file: LockedFile) -> Path | None:
        return next(
            (path for digest in _digests(file) if (path := self._given_up.get(digest))), None
        )

    def take(
        self,
        file: LockedFile,
        is_right: Callable[[FileDigests], bool],
        progress: Callable[[int], None],
    ) -> FileDigests | None:
        """Puts a local file into the bundle, verified; None if there is none, or a damaged one.

        Raises:
            OSError: the disk of the bundle is full or cannot be written.
        """
        target = self._root / file.path
        if (own := self._own(file)) is not None:
            brought = place_verified(own, file, target, is_right, progress)
            if brought is not None and brought[1]:
                return self._came(brought[0], "in this bundle, under another name")
        if self._store is None:
            return None
        taken = self._store.take(file, target, is_right, progress)
        if isinstance(taken, Damaged):
            self._reporter.warn(describe_damage(file.path, taken))
            return None
        return self._came(taken, f"in the store {self._store.root}") if taken is not None else None

    def _came(self, digests: FileDigests, where: str) -> FileDigests:
        self._taken.setdefault(where, []).append(digests.size)
        return digests

    def report_taken(self) -> None:
        """Prints which files were here already, and where."""
        for where, sizes in self._taken.items():
            were = "was" if len(sizes) == 1 else "were"
            self._reporter.note(
                f"{human_count(len(sizes), 'file')} ({human_size(sum(sizes))}) {were} "
                f"here already, {where}"
            )

    def keep(self, digests: Mapping[str, FileDigests]) -> None:
        """Shares this bundle's files with later bundles. A store that is read-only is no error."""
        if self._store is None:
            return
        try:
            fates = {
                path: self._store.keep(self._root / path, known) for path, known in digests.items()
            }
        except OSError as error:
            self._reporter.warn(
                f"{error.filename or self._store.root}: {error.strerror}; not kept in the store"
            )
            return
        if new := [digests[path].size for path, fate in fates.items() if fate is Kept.NEW]:
            self._reporter.note(
                f"{human_count(len(new), 'file')} ({human_size(sum(new))}) shared with later "
                f"bundles, on disk once: store {self._store.root}"
            )
        elif Kept.APART in fates.values():
            self._reporter.note(
                f"nothing shared with later bundles: the store {self._store.root} is on another "
                "disk (AIRLIFT_STORE=FOLDER names one on this disk)"
            )


def _digests(file: LockedFile) -> list[tuple[str, str]]:
    """The digests of a locked file, as algorithm and value."""
    known = [("sha256", file.sha256)] if file.sha256 else []
    if file.upstream is not None:
        known.append((file.upstream.algorithm.removeprefix("lfs-"), file.upstream.value))
    return known
