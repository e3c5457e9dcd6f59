"""`stage gc`: drops from the shared store what no bundle uses any more.

A content is used if it has another name on the disk: a hard link in a bundle, wherever that was
moved. It is also used if the lock of a bundle names it, the bundle used the store, and it is still
at the same path (reflinks and copies have no names to count). Dropping never harms a bundle, which
has its own files. Only the next bundle fetches the content again.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stage.bundle import bundle as layout
from stage.errors import StageError
from stage.fetch.store import BY_GIT, CONTENTS, USERS, SharedStore
from stage.lock.read import read_lock
from stage.util.paths import PARTIAL_SUFFIX

ABANDONED_AFTER_S = 24 * 3600.0


@dataclass(frozen=True)
class Collection:
    """What a `gc` dropped, or would drop.

    Attributes:
        dropped: contents that nobody uses: sha256 -> bytes.
        kept: those in use, likewise.
        names: what dropped contents were in which bundle, by sha256, where that is known.
        bundles: folders that use the store.
        gone: folders that used it and are no bundles any more (deleted, or moved).
    """

    store: Path
    dropped: dict[str, int]
    kept: dict[str, int]
    names: dict[str, str]
    bundles: tuple[Path, ...]
    gone: tuple[Path, ...]
    dry_run: bool

    def to_json(self) -> dict[str, Any]:
        """As `--json` prints it."""
        return {
            "store": str(self.store),
            "dry_run": self.dry_run,
            "dropped": self.dropped,
            "dropped_bytes": sum(self.dropped.values()),
            "names": self.names,
            "kept_files": len(self.kept),
            "kept_bytes": sum(self.kept.values()),
            "bundles": [str(path) for path in self.bundles],
            "gone": [str(path) for path in self.gone],
        }


def collect(store: SharedStore, *, dry_run: bool) -> Collection:
    """Drops what nobody uses; with `dry_run`, only says what that is.

    Raises:
        OSError: the store cannot be read or changed.
    """
    users = store.users()
    named: set[str] = set()
    gone: dict[Path, Path] = {}
    for note, (bundle, _) in users.items():
        digests = _digests_of(bundle)
        if digests is None:
            gone[note] = bundle
        else:
            named |= digests
    dropped: dict[str, int] = {}
    kept: dict[str, int] = {}
    for path, status in _files(store.root / CONTENTS):
        if path.suffix == PARTIAL_SUFFIX:
            continue
        in_use = status.st_nlink > 1 or path.name in named
        (kept if in_use else dropped)[path.name] = status.st_size
    names = {
        sha256: f"{path} of {bundle}"
        for bundle, known in users.values()
        for sha256, path in known.items()
        if sha256 in dropped
    }
    if not dry_run:
        for sha256 in dropped:
            store.entry(sha256).unlink(missing_ok=True)
        for note, (bundle, known) in users.items():
            if note in gone:
                note.unlink(missing_ok=True)
            elif known.keys() & dropped.keys():
                store.write_note(
                    note, bundle, {s: path for s, path in known.items() if s not in dropped}
                )
        _tidy(store)
    bundles = tuple(user.folder for note, user in users.items() if note not in gone)
    return Collection(store.root, dropped, kept, names, bundles, tuple(gone.values()), dry_run)


def _digests_of(bundle: Path) -> set[str] | None:
    """The digests in a bundle's lock; None if no bundle is there; empty without a readable lock."""
    if not (bundle / layout.BAGIT).is_file() and not (bundle / layout.FETCH_PARTIAL).is_file():
        return None
    lock = bundle / layout.LOCK
    try:
        return {
            file.sha256 for file in read_lock(lock.read_bytes(), str(lock)).files if file.sha256
        }
    except (OSError, StageError):
        return set()


def _files(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Regular files, and links as themselves."""
    for parent, _, names in os.walk(folder):
        for name in sorted(names):
            path = Path(parent, name)
            status = path.lstat()
            if stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode):
                yield path, status


def _tidy(store: SharedStore) -> None:
    """Removes dangling links and files of interrupted fetches, but not those of a running fetch."""
    for part in (CONTENTS, BY_GIT, USERS):
        for path, status in _files(store.root / part):
            dangling = stat.S_ISLNK(status.st_mode) and not path.exists()
            left = (
                path.suffix == PARTIAL_SUFFIX and status.st_ctime < time.time() - ABANDONED_AFTER_S
            )
            if dangling or left:
                path.unlink(missing_ok=True)
