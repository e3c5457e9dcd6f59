"""The folder a fetch works in: what lies there, what of it is ours, what is in the way.

A fetch deletes what an earlier manifest brought and this one does not ask for. So it must know its own files from a
person's: ours are those named by the folder's own lock, by the journal of an interrupted fetch, or partial files.
Anything else stops the fetch before it touches the network.
"""

from __future__ import annotations

import fcntl
import os
import shlex
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from stage import bundle as layout
from stage.asset import LockedFile
from stage.digest import is_hex
from stage.disk import make_folder, some_of
from stage.errors import IncompleteError, StageError, UsageError
from stage.lockfile import Lockfile
from stage.lockreader import read_lock
from stage.manifest import Manifest
from stage.names import PARTIAL_SUFFIX, printable

_SHOWN = 10  # names in one line
WORKSHOP = "workshop.partial"  # where archives lie and files are made, while `stage fetch` works
_OURS = {*layout.TAG_FILES, *layout.SEAL, layout.JOURNAL}


@contextmanager
def alone_in(root: Path) -> Iterator[None]:
    """Keeps a second fetch out of a folder, which is made if need be; one made here is removed if it is left empty.

    The lock (flock on the folder itself) ends with the process, however that ends. Where the file system knows no
    locks (some network disks) the fetch goes on without.

    Raises:
        IncompleteError: another fetch is at work there.
    """
    if root.exists() and not root.is_dir():
        yield  # `WorkFolder.inspect` has the words
        return
    was_there = root.exists()
    make_folder(root)
    descriptor = os.open(root, os.O_RDONLY)
    try:
        _lock(descriptor, root)
        try:
            yield
        finally:
            if not was_there:
                with suppress(OSError):  # most often: it is not empty
                    root.rmdir()
    finally:
        os.close(descriptor)


def _lock(descriptor: int, root: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise IncompleteError(
            f"{root}: another `stage fetch` is at work in this folder.", "Wait until it has ended, then run again."
        ) from None
    except OSError:
        pass


@dataclass(frozen=True)
class WorkFolder:
    """A bundle's folder before a fetch: size in bytes of each file in it, and which payload files are known as ours.

    `lock`: of the bundle that lies there, if it can be read.
    """

    root: Path
    sizes: dict[str, int]
    ours: frozenset[str]
    lock: Lockfile | None = None

    @staticmethod
    def inspect(root: Path) -> WorkFolder:
        """Looks at a folder that may not exist yet.

        Raises:
            UsageError: it is a file, has links in it, or is a folder of something else.
        """
        if not root.exists():
            return WorkFolder(root, {}, frozenset())
        if not root.is_dir():
            raise UsageError(f"{root}: is a file; a bundle is a folder.", "Choose another -o.")
        if any(root.iterdir()):
            try:
                layout.require_bundle(root)
            except UsageError:
                raise UsageError(
                    f"{root}: is not empty and not a bundle; nothing was changed.", "Choose a new folder with -o."
                ) from None
        lock = _lock_in(root)
        return WorkFolder(root, _sizes(root), _known_paths(root, lock), lock)

    def require_same_bundle(self, manifest: Manifest) -> None:
        """A bundle of another name is not turned into this manifest's by a slip of the hand.

        Raises:
            UsageError: one lies here.
        """
        if self.lock is None or self.lock.name == manifest.name:
            return
        beside = shlex.quote(str(self.root.parent / manifest.name))
        raise UsageError(
            f"{self.root}: another bundle is here: {printable(self.lock.name)}; {manifest.path} makes "
            f"{printable(manifest.name)}. Nothing was changed.",
            f"Give it a folder of its own: stage fetch {manifest.path} -o {beside}   (to make this bundle that one: "
            f"write `name: {self.lock.name}` in {manifest.path}, or remove the folder)",
        )

    def size_of(self, path: str) -> int | None:
        """Bytes of a file that is here; None if it is not."""
        return self.sizes.get(path)

    @property
    def partial_size(self) -> int:
        """Bytes that interrupted downloads left."""
        return sum(size for path, size in self.sizes.items() if _is_unfinished(path))

    def stale(self, wanted: set[str]) -> list[str]:
        """Payload files of ours that `wanted` does not name any more.

        Raises:
            UsageError: files that nobody fetched lie in the folder.
        """
        stale: list[str] = []
        foreign: list[str] = []
        for path in self.sizes:
            if path in wanted or path in _OURS or _is_unfinished(path) or _is_of_blocks(path):
                continue
            (stale if path in self.ours else foreign).append(path)
        if foreign:
            told = some_of([printable(path) for path in foreign], _SHOWN)
            raise UsageError(
                f"{self.root}: not from any fetch: {told}. A bundle holds nothing else.",
                "Move that out of the folder, then run again.",
            )
        return stale

    def given_up(self, wanted: set[str]) -> list[LockedFile]:
        """Files of the bundle that lay here before, as its lock describes them, and that `wanted` does not name."""
        files = self.lock.files if self.lock else ()
        return [file for file in files if file.path not in wanted and self.sizes.get(file.path) == file.size]

    def stale_blocks(self, wanted: set[str]) -> list[str]:
        """Block digests of files that are not in the bundle any more."""
        return [path for path in self.sizes if _is_of_blocks(path) and path not in wanted]

    def mark_unfinished(self, paths: set[str]) -> None:
        """Before anything changes: takes the seal off, and notes which files are going to be ours."""
        self.root.mkdir(parents=True, exist_ok=True)
        with open(self.root / layout.JOURNAL, "a", encoding="utf-8") as journal:
            journal.writelines(f"{path}\n" for path in sorted(paths))
            journal.flush()
            os.fsync(journal.fileno())
        (self.root / layout.TAG_MANIFEST).unlink(missing_ok=True)
        (self.root / layout.SIGNATURE).unlink(missing_ok=True)

    def remove(self, paths: list[str]) -> None:
        """Deletes files of ours, the workshop, every leftover partial file, and folders that are empty then."""
        if (self.root / WORKSHOP).is_dir():
            shutil.rmtree(self.root / WORKSHOP)
        partial = [p.relative_to(self.root).as_posix() for p in self.root.rglob(f"*{PARTIAL_SUFFIX}")]
        for path in {*paths, *partial} - {layout.JOURNAL}:
            (self.root / path).unlink(missing_ok=True)
        for folder, _, _ in sorted(os.walk(self.root), reverse=True):
            if folder != str(self.root) and not any(Path(folder).iterdir()):
                Path(folder).rmdir()


def _is_unfinished(path: str) -> bool:
    return path.endswith(PARTIAL_SUFFIX) or path.startswith(f"{WORKSHOP}/")


def _is_of_blocks(path: str) -> bool:
    """Whether a fetch wrote it: what a person put beside the block digests has another name than a digest."""
    folder, _, name = path.rpartition("/")
    return folder == layout.BLOCKS and is_hex(name, 64)


def _sizes(root: Path) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for folder, folders, files in os.walk(root):
        for name in [*folders, *files]:
            path = Path(folder, name)
            status = path.lstat()
            if stat.S_ISREG(status.st_mode):
                sizes[path.relative_to(root).as_posix()] = status.st_size
            elif not stat.S_ISDIR(status.st_mode) and WORKSHOP not in path.relative_to(root).parts[:1]:
                raise UsageError(
                    f"{path}: a link or special file inside a bundle.", "Remove it (a bundle holds regular files only)."
                )
    return sizes


def _lock_in(root: Path) -> Lockfile | None:
    path = root / layout.LOCK
    try:
        return read_lock(path.read_bytes(), str(path)) if path.is_file() else None
    except StageError:
        return None


def _known_paths(root: Path, lock: Lockfile | None) -> frozenset[str]:
    """Payload paths that an earlier fetch into this folder wrote or was going to write."""
    known = {file.path for file in lock.files} if lock else set()
    manifest, journal = root / layout.MANIFEST, root / layout.JOURNAL
    if lock is None and (root / layout.LOCK).is_file() and manifest.is_file():
        known |= set(layout.parse_manifest(manifest.read_bytes()))  # a damaged lock names nothing
    if journal.is_file():
        known |= set(journal.read_text(encoding="utf-8", errors="replace").splitlines())
    return frozenset(known)
