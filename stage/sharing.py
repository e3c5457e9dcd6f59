"""What a fetch has on this machine already: files of the bundle under names it gives up, and the shared store.

Looks there before the network is asked, keeps in the store what the bundle has, and says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from stage.asset import LockedFile
from stage.digest import FileDigests
from stage.disk import human_count, human_size
from stage.progress import Reporter
from stage.store import Damaged, Kept, Store, bring_proven, damage_in_words


class Sharing:
    """One fetch's use of what is here.

    Args:
        store: None: there is none, and nothing is shared with other bundles.
        root: the bundle.
        given_up: files of an earlier state of the bundle, which lie in it and are going to be removed.
    """

    def __init__(
        self, store: Store | None, root: Path, reporter: Reporter, given_up: Iterable[LockedFile] = ()
    ) -> None:
        self._store, self._root, self._reporter = store, root, reporter
        self._one_disk = store is not None and store.shares_disk_with(root)
        self._given_up = {digest: root / file.path for file in given_up for digest in _digests(file)}
        self._taken: dict[str, list[int]] = {}

    def has(self, file: LockedFile) -> bool:
        """Whether something here claims to be this file."""
        return self._own(file) is not None or (self._store is not None and self._store.find(file) is not None)

    def is_free(self, file: LockedFile) -> bool:
        """Whether the file can be had without room on the disk."""
        return self._own(file) is not None or (self._one_disk and self.has(file))

    def _own(self, file: LockedFile) -> Path | None:
        return next((path for digest in _digests(file) if (path := self._given_up.get(digest))), None)

    def take(
        self, file: LockedFile, is_right: Callable[[FileDigests], bool], progress: Callable[[int], None]
    ) -> FileDigests | None:
        """Brings a file that is here, proven; None if that was not to be, which the person hears if it is damage.

        Raises:
            OSError: the disk of the bundle is full or cannot be written.
        """
        target = self._root / file.path
        if (own := self._own(file)) is not None:
            brought = bring_proven(own, file, target, is_right, progress)
            if brought is not None and brought[1]:
                return self._came(brought[0], "in this bundle, under another name")
        if self._store is None:
            return None
        taken = self._store.take(file, target, is_right, progress)
        if isinstance(taken, Damaged):
            self._reporter.warn(damage_in_words(file.path, taken))
            return None
        return self._came(taken, f"in the store {self._store.root}") if taken is not None else None

    def _came(self, digests: FileDigests, where: str) -> FileDigests:
        self._taken.setdefault(where, []).append(digests.size)
        return digests

    def report_taken(self) -> None:
        """Says what was here already, and where."""
        for where, sizes in self._taken.items():
            were = "was" if len(sizes) == 1 else "were"
            self._reporter.note(
                f"{human_count(len(sizes), 'file')} ({human_size(sum(sizes))}) {were} here already, {where}"
            )

    def keep(self, digests: Mapping[str, FileDigests]) -> None:
        """Shares this bundle's files with bundles to come. A store that cannot be written is no reason to fail."""
        if self._store is None:
            return
        try:
            fates = {path: self._store.keep(self._root / path, known) for path, known in digests.items()}
            if names := {digests[p].sha256: p for p, fate in fates.items() if fate in (Kept.NEW, Kept.ALREADY)}:
                self._store.note_user(self._root, names)
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


def _digests(file: LockedFile) -> list[tuple[str, str]]:
    """What a file's content is known by."""
    known = [("sha256", file.sha256)] if file.sha256 else []
    if file.upstream is not None:
        known.append((file.upstream.algorithm.removeprefix("lfs-"), file.upstream.value))
    return known
