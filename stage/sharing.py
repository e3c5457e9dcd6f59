"""What a fetch does with the shared store (`stage.store`): looks there first, keeps there what it has, and says so."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from stage.digest import FileDigests
from stage.disk import human_count, human_size
from stage.lockfile import LockedFile
from stage.progress import Reporter
from stage.store import Damaged, Kept, Store, damage_in_words


class Sharing:
    """One fetch's use of the store.

    Args:
        store: None: there is none, and nothing is shared.
        root: the bundle.
    """

    def __init__(self, store: Store | None, root: Path, reporter: Reporter) -> None:
        self._store, self._root, self._reporter = store, root, reporter
        self._one_disk = store is not None and store.shares_disk_with(root)

    def has(self, file: LockedFile) -> bool:
        """Whether the store has what claims to be this file."""
        return self._store is not None and self._store.find(file) is not None

    def is_free(self, file: LockedFile) -> bool:
        """Whether the file can be had without room on the disk."""
        return self._one_disk and self.has(file)

    def take(
        self, file: LockedFile, is_right: Callable[[FileDigests], bool], progress: Callable[[int], None]
    ) -> FileDigests | None:
        """Brings a file from the store, proven; None if that was not to be, which the person hears if it is damage.

        Raises:
            OSError: the disk of the bundle is full or cannot be written.
        """
        if self._store is None:
            return None
        taken = self._store.take(file, self._root / file.path, is_right, progress)
        if isinstance(taken, Damaged):
            self._reporter.warn(damage_in_words(file.path, taken))
            return None
        return taken

    def report_taken(self, sizes: Collection[int]) -> None:
        """Says what came from the store, by the sizes of the files."""
        if sizes and self._store is not None:
            count, size = human_count(len(sizes), "file"), human_size(sum(sizes))
            self._reporter.note(f"{count} ({size}) were here already, in the store {self._store.root}")

    def keep(self, digests: Mapping[str, FileDigests]) -> None:
        """Shares this bundle's files with bundles to come. A store that cannot be written is no reason to fail."""
        if self._store is None:
            return
        try:
            fates = {path: self._store.keep(self._root / path, known) for path, known in digests.items()}
            if {Kept.NEW, Kept.ALREADY} & set(fates.values()):
                self._store.note_user(self._root)
        except OSError as error:
            self._reporter.warn(f"{error.filename or self._store.root}: {error.strerror}; not kept in the store")
            return
        if new := [digests[path].size for path, fate in fates.items() if fate is Kept.NEW]:
            self._reporter.note(
                f"{human_count(len(new), 'file')} ({human_size(sum(new))}) shared with bundles to come, on disk once: "
                f"store {self._store.root} (`stage gc` frees what no bundle uses)"
            )
        elif Kept.APART in fates.values():
            self._reporter.note(
                f"nothing shared with bundles to come: the store {self._store.root} is on another disk "
                "(AIRLIFT_STORE=FOLDER names one on this disk)"
            )
