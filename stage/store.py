"""The shared store: contents that several bundles on one machine have in common lie on its disk once.

fetch -> `take`: what is here already comes into the bundle without the network; `keep`: what came from elsewhere is
noted here for the next bundle. `sha256/ab/abcd...` is a content, `git-sha1/12/12ef...` points to one from the only
digest a Hub publishes of a small file, `bundles/...` names the folders that used the store (`stage.gc` asks them).

Shared by reflink where the file system has them (bundles stay independent), else by hard link: then bundle and store
are one file, which is made read-only, and an edit in place would reach every bundle that has it. So nothing is
believed: whatever is taken is hashed under a `.partial` name before it gets its own.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import stat
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from stage import bundle as layout
from stage.asset import LockedFile
from stage.digest import FileDigests, hash_file
from stage.disk import human_count, sync_folder, write_atomically
from stage.errors import UsageError
from stage.names import PARTIAL_SUFFIX

SHARED_FROM = 2**20  # bytes: sharing less saves nothing, and small files (config.json) are the ones people edit
CONTENTS, BY_GIT, USERS = "sha256", "git-sha1", "bundles"
_FICLONE = 0x40049409  # linux/fs.h: one more file on the same blocks, copied only where one of them is changed

Progress = Callable[[int], None]


def store_from(environ: Mapping[str, str]) -> Store | None:
    """The store that the environment means: `$AIRLIFT_STORE`, else in the user's cache folder; `none`: no store.

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
        return Store(Path(named))
    cache = environ.get("XDG_CACHE_HOME", "")
    if not Path(cache).is_absolute():  # the specification says so of relative and of empty ones
        home = environ.get("HOME", "")
        if not Path(home).is_absolute():
            return None
        cache = f"{home}/.cache"
    return Store(Path(cache, "airlift", "store"))


class Kept(Enum):
    """What became of a file that was offered to the store."""

    NEW = "new"
    ALREADY = "already"
    TOO_SMALL = "too small"
    APART = "apart"  # on another disk, where it could only be copied


@dataclass(frozen=True)
class Damaged:
    """A content of the store that was not what its name says. It is gone from the store by now.

    Attributes:
        found: its sha256.
        bundles: folders whose lock names the content; where it was shared by hard link they have the damage too.
    """

    path: Path
    found: str
    bundles: tuple[Path, ...]


class User(NamedTuple):
    """A bundle that uses the store: its folder, maybe gone or moved; sha256 -> what it is or was called there."""

    folder: Path
    names: dict[str, str]


def _read_note(note: Path) -> User:
    folder, *lines = os.fsdecode(note.read_bytes()).split("\0")
    return User(Path(folder), {line[:64]: line[65:] for line in lines})


@dataclass(frozen=True)
class Store:
    """A folder of contents by digest. Several fetches may use it at once: entries appear whole and never change."""

    root: Path

    def entry(self, sha256: str) -> Path:
        """Where the content of that digest lies, if it is here."""
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
        """Bytes of each content, for whoever knows no digests yet."""
        return {path.lstat().st_size for path in (self.root / CONTENTS).glob("*/*")}

    def shares_disk_with(self, folder: Path) -> bool:
        """Whether files here and there can be the same bytes on one disk."""
        try:
            return _nearest(self.root).stat().st_dev == _nearest(folder).stat().st_dev
        except OSError:
            return False

    def take(
        self, file: LockedFile, target: Path, is_right: Callable[[FileDigests], bool], progress: Progress
    ) -> FileDigests | Damaged | None:
        """Brings a content into a bundle, hashing it before it has its name there.

        Args:
            is_right: whether digests (git's with them, if the lock has only that) are those of the locked file.

        Returns:
            Its digests; None if it is not here; `Damaged` if what was here is not what it should be.

        Raises:
            OSError: the disk of `target` is full or cannot be written.
        """
        entry = self.find(file)
        brought = bring_proven(entry, file, target, is_right, progress) if entry is not None else None
        if entry is None or brought is None:
            return None
        digests, right = brought
        return digests if right else self._drop(entry, digests.sha256)

    def keep(self, path: Path, digests: FileDigests) -> Kept:
        """Shares a bundle's file, whose digests were just computed, with bundles to come. Costs no space.

        Raises:
            OSError: the store cannot be written.
        """
        if digests.size < SHARED_FROM:
            return Kept.TOO_SMALL
        entry = self.entry(digests.sha256)
        is_new = not entry.exists()
        if is_new and not self._add(path, entry):
            return Kept.APART
        if digests.git_sha1 is not None and self._sha256_of_git(digests.git_sha1) != digests.sha256:
            self._note_git(digests.git_sha1, digests.sha256)
        return Kept.NEW if is_new else Kept.ALREADY

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

    def note_user(self, bundle: Path, names: Mapping[str, str]) -> None:
        """Writes down that this folder uses the store, and what contents are called there, for whoever asks later.

        Args:
            names: sha256 -> path in the bundle. What was noted before is kept: the bundle had that once.

        Raises:
            OSError: the store cannot be written.
        """
        folder = str(bundle.resolve())
        note = self.root / USERS / hashlib.sha256(os.fsencode(folder)).hexdigest()[:32]
        before = _read_note(note).names if note.exists() else {}
        if not note.exists() or {**before, **names} != before:
            self.write_note(note, bundle.resolve(), {**before, **names})

    @staticmethod
    def write_note(note: Path, folder: Path, names: Mapping[str, str]) -> None:
        """Writes a note anew.

        Raises:
            OSError: the store cannot be written.
        """
        note.parent.mkdir(parents=True, exist_ok=True)
        lines = [str(folder), *(f"{sha256} {path}" for sha256, path in sorted(names.items()))]
        write_atomically(note, b"\0".join(map(os.fsencode, lines)))

    def users(self) -> dict[Path, User]:
        """The notes of `note_user`, by where they lie."""
        notes = self.root / USERS
        found = sorted(notes.iterdir()) if notes.is_dir() else []
        return {note: _read_note(note) for note in found if note.suffix != PARTIAL_SUFFIX}

    def _drop(self, entry: Path, found: str) -> Damaged:
        shared = entry.lstat().st_nlink > 1
        entry.unlink(missing_ok=True)
        named = f'"{entry.name}"'.encode()
        locks = ((bundle, bundle / layout.LOCK) for bundle, _ in self.users().values()) if shared else ()
        return Damaged(entry, found, tuple(b for b, lock in locks if lock.is_file() and named in lock.read_bytes()))


def bring_proven(
    source: Path, file: LockedFile, target: Path, is_right: Callable[[FileDigests], bool], progress: Progress
) -> tuple[FileDigests, bool] | None:
    """Shares or copies a file that lies on this machine, and hashes it before it has its name.

    Returns:
        What its digests are, and whether they are right: only then it is in place. None if the source went away.

    Raises:
        OSError: the disk of `target` is full or cannot be written.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = _partial(target)  # no name that a download would go on writing to
    try:
        if not _share(source, partial) and not _copied(source, partial):
            return None
        git = file.upstream is not None and file.upstream.algorithm == "git-sha1"
        digests = hash_file(partial, git=git, progress=progress)
        if not is_right(digests):
            progress(-digests.size)
            return digests, False
        target.unlink(missing_ok=True)  # renamed onto another name of the same file, both would stay
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    sync_folder(target.parent)
    return digests, True


def damage_in_words(what: str, damaged: Damaged) -> str:
    """What to say of a damaged content of the store."""
    bundles = " and ".join(f"`stage verify {bundle}`" for bundle in damaged.bundles)
    count = human_count(len(damaged.bundles), "bundle")
    others = f" {count} may share the damage: {bundles}." if bundles else ""
    return (
        f"{what}: the store's copy is damaged (its sha256 is {damaged.found}); it is dropped from the store and the "
        f"file fetched anew.{others}"
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
    """Makes `target` the same bytes on the same disk: a reflink, else a hard link; False if neither can be."""
    target.unlink(missing_ok=True)
    if _reflink(source, target):
        return True
    status = source.lstat()
    if status.st_uid != os.geteuid():  # somebody else may change it after we looked
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
    """A copy; False if the source went away.

    Raises:
        OSError: no room.
    """
    if not source.is_file():
        return False
    with open(source, "rb") as reader, open(target, "xb") as writer:
        shutil.copyfileobj(reader, writer, 2**22)
        writer.flush()
        os.fsync(writer.fileno())
    return True
