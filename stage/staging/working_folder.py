"""The folder of a fetch: the files in it, which of them a fetch wrote, and which must not be there.

A fetch deletes files that an earlier manifest asked for and this one does not. So it must
distinguish its own files from a user's. Its own are those that the folder's lock or the journal of
an interrupted fetch names, and partial files. Any other file stops the fetch before it uses the
network.
"""

from __future__ import annotations

import fcntl
import os
import shlex
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from stage.bundle import bundle as layout
from stage.errors import IncompleteError, StageError, UsageError, quoted
from stage.files import join_limited, make_folder
from stage.lock.manifest import Manifest
from stage.lock.model import LockedFile, Lockfile, read_lock
from stage.paths import PARTIAL_SUFFIX, printable

_SHOWN = 10  # names in one line
# The folder inside a bundle where a fetch or an apply builds files before they get their places: it
# is on the same disk, so a rename moves them.
WORKSHOP = "workshop.partial"
_OURS = {*layout.TAG_FILES, *layout.SEAL, layout.FETCH_PARTIAL}


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
                layout.check_is_bundle(root)
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
        beside = shlex.quote(str(self.root.parent / manifest.name))
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
        with open(self.root / layout.FETCH_PARTIAL, "a", encoding="utf-8") as journal:
            journal.writelines(f"{path}\n" for path in sorted(paths))
            journal.flush()
            os.fsync(journal.fileno())
        (self.root / layout.TAG_MANIFEST).unlink(missing_ok=True)
        (self.root / layout.SIGNATURE).unlink(missing_ok=True)

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
        self.drop({*paths, *partial} - {layout.FETCH_PARTIAL})


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
    path = root / layout.LOCK
    try:
        return read_lock(path.read_bytes(), str(path)) if path.is_file() else None
    except StageError:
        return None


def _known_paths(root: Path, lock: Lockfile | None) -> frozenset[str]:
    """Payload paths that an earlier fetch into this folder wrote or was going to write."""
    known = {file.path for file in lock.files} if lock else set()
    manifest, journal = root / layout.MANIFEST, root / layout.FETCH_PARTIAL
    if lock is None and (root / layout.LOCK).is_file() and manifest.is_file():
        known |= set(layout.parse_manifest(manifest.read_bytes()))  # a damaged lock names nothing
    if journal.is_file():
        known |= set(journal.read_text(encoding="utf-8", errors="replace").splitlines())
    return frozenset(known)
