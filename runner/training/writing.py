"""How a checkpoint comes to be there whole or not at all.

All ranks write into `step-N.tmp/`; when all are done they hash what lies there, rank 0 writes `files.json` (names,
sizes, sha256), and one rename makes it `step-N/`. A kill at any moment leaves a `.tmp` that nobody reads. It goes the
same way: by one rename to a `.gone`, which is then removed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any

from runner.errors import human_size, sync_folder
from runner.resume import STATE, TrainingState
from runner.training.ranks import Ranks

FILES = "files.json"
GONE = ".gone"
LATEST = "latest"
FORMAT = 1


class Writing:
    """One checkpoint that is being written. Every method is called by all ranks.

    Args:
        final: its folder once it is whole.
        ranks: who agrees on it. In a thread beside training: a group of its own, or words meant for one are heard by
            the other.
    """

    def __init__(self, final: Path, state: TrainingState, ranks: Ranks) -> None:
        self._final, self._state, self._ranks = final, state, ranks
        self.folder = final.with_name(f"{final.name}.tmp")

    def begin(self) -> None:
        """Makes room under another name; what was there of the same step was damaged, or torn.

        Raises:
            OSError: on every rank, if there is no room to be made.
        """
        self.attempt(self._make_room)  # which is also where the others wait for it

    def _make_room(self) -> None:
        if self._ranks.is_first:
            for old in (self.folder, self._final):
                if old.exists():
                    discard(old)
            self.folder.mkdir(parents=True)

    def attempt(self, work: Callable[[], None]) -> None:
        """Runs `work` on all ranks; if the disk fails it on one, it has failed on all, and nothing is left of it.

        Raises:
            OSError: on every rank.
        """
        problem: OSError | None = None
        try:
            work()
        except OSError as error:
            problem = error
        except RuntimeError as error:  # torch.save wraps a full disk: "[enforce fail at inline_container.cc:...]"
            if "inline_container" not in str(error) and "write" not in str(error):
                raise
            free = human_size(shutil.disk_usage(self._final.parent).free)
            problem = OSError(f"the checkpoint cannot be written ({free} free): {str(error).splitlines()[0]}")
        if self._ranks.any(problem is not None):
            if self._ranks.is_first:
                shutil.rmtree(self.folder, ignore_errors=True)
            raise problem or OSError("another rank could not write its part of the checkpoint")

    def complete(self, write: Callable[[], None], then: Callable[[], None]) -> None:
        """Has the content written, then makes it a checkpoint.

        Args:
            write: writes this rank's part into `folder`.
            then: done by rank 0 while the others wait, when the checkpoint is there.

        Raises:
            OSError: on every rank, if any rank cannot write (a full disk).
        """
        seen: list[str] = []
        mine: list[dict[str, Any]] = []
        self.attempt(lambda: self._write(write))
        self._ranks.barrier()
        self.attempt(lambda: seen.extend(names_in(self.folder)))
        names = all_of(self._ranks.gather(seen))
        self.attempt(lambda: mine.extend(self._measure(share(names, self._ranks))))
        listed = [entry for part in self._ranks.gather(mine) for entry in part]
        self.attempt(lambda: self._publish(listed, then))

    def _write(self, write: Callable[[], None]) -> None:
        write()
        if self._ranks.is_first:
            write_synced(self.folder / STATE, asdict(self._state))

    def _measure(self, names: Iterable[str]) -> list[dict[str, Any]]:
        """Name, size and sha256 of files, made durable."""
        measured_files = []
        for name in names:
            with open(self.folder / name, "rb") as file:
                os.fsync(file.fileno())
            measured_files.append({"path": name, **measured(self.folder / name)})
        return measured_files

    def _publish(self, listed: list[dict[str, Any]], then: Callable[[], None]) -> None:
        if not self._ranks.is_first:
            return
        files = sorted(listed, key=lambda entry: str(entry["path"]))
        write_synced(self.folder / FILES, {"format": FORMAT, "files": files})
        self.folder.replace(self._final)
        sync_folder(self._final.parent)
        then()


def names_in(folder: Path) -> list[str]:
    """The files of a checkpoint but for its list, as this node sees them: on NFS what others made may be lacking yet.

    What this node made itself is there.
    """
    return [p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file() and p != folder / FILES]


def all_of(parts: Iterable[Iterable[str]]) -> list[str]:
    """What the ranks see together: every file, as each was made by one of them. Sorted."""
    return sorted({name for part in parts for name in part})


def share(names: list[str], ranks: Ranks) -> list[str]:
    """Which of these this rank looks after. The names must be the same on all ranks: then each is looked at once."""
    return names[ranks.rank :: ranks.world_size]


def discard(folder: Path) -> str | None:
    """Removes a checkpoint, whole or torn, so that half of one never counts as one.

    Returns:
        Why something of it is still there; None: nothing is. On NFS that is no fault: of a file that somebody has open
        a `.nfs...` stays until it is closed. It never has the checkpoint's name, unless that cannot be changed.
    """
    aside, why = folder, ""
    try:
        if folder.suffix != GONE:
            aside = next(p for n in count() if not (p := folder.with_name(f"{folder.name}.{n}{GONE}")).exists())
            folder.replace(aside)
        shutil.rmtree(aside)
    except OSError as error:
        why = str(error.strerror or error)
        if aside.suffix == GONE:
            shutil.rmtree(aside, ignore_errors=True)  # the rest of it
    return why if why and (aside.exists() or folder.exists()) else None


def measured(path: Path) -> dict[str, Any]:
    """Size in bytes and sha256 of a file."""
    with open(path, "rb") as file:
        digest = hashlib.sha256()
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    return {"size": path.stat().st_size, "sha256": digest.hexdigest()}


def write_synced(path: Path, document: dict[str, Any]) -> None:
    """A JSON file that is on the disk when this returns."""
    with open(path, "w", encoding="utf-8") as file:
        json.dump(document, file, indent=1, sort_keys=True)
        file.flush()
        os.fsync(file.fileno())
