"""Makes a checkpoint whole or not there.

All ranks write into `step-N.tmp/`. When all are done, they hash the files, rank 0 writes
`files.json` (names, sizes, sha256), and one rename makes it `step-N/`. A kill at any moment leaves
a `.tmp` folder that nothing reads. Removal works the same way: one rename to `.gone`, then the
folder is deleted.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from runner.disks import write_fault
from runner.errors import sync_folder
from runner.inputs import hash_file
from runner.run_folder.training_state import STATE, TrainingState
from runner.training.components.process_group import Ranks

FILES = "files.json"
GONE = ".gone"
LATEST = "latest"
FORMAT = 1
T = TypeVar("T")


class AtomicCheckpoint:
    """One checkpoint while it is written. All ranks call every method.

    Args:
        final: its folder once it is whole.
        state: is written with it.
        ranks: agree on it.
    """

    def __init__(self, final: Path, state: TrainingState, ranks: Ranks) -> None:
        self._final, self._state, self._ranks = final, state, ranks
        self.folder = final.with_name(f"{final.name}.tmp")

    def begin(self) -> None:
        """Makes an empty `.tmp` folder. Older folders of the same step were damaged or torn: they
        go.

        Raises:
            OSError: on every rank, if the folder cannot be made.
        """
        self.attempt(self._make_room)  # the other ranks wait here until it exists

    def _make_room(self) -> None:
        if self._ranks.is_first:
            for old in (self.folder, self._final):
                if old.exists():
                    discard(old)
            self.folder.mkdir(parents=True)

    def attempt(self, work: Callable[[], T]) -> T:
        """Runs `work` on all ranks. If the disk fails on one rank, it fails on all, and nothing is
        left.

        Raises:
            OSError: the same on every rank.
        """
        problem: OSError | None = None
        try:
            done = work()
        except OSError as error:
            problem = error if error.errno else self._numbered(error)
        except RuntimeError as error:
            # torch.save wraps a full disk: "[enforce fail at inline_container.cc:...]".
            if "inline_container" not in str(error) and "write" not in str(error):
                raise
            problem = self._numbered(error)
        problems = [one for one in self._ranks.gather(problem) if one is not None]
        if problems:
            if self._ranks.is_first:
                shutil.rmtree(self.folder, ignore_errors=True)
            raise problems[0]
        return done

    def _numbered(self, error: Exception) -> OSError:
        """The error of a library that hides its number: learnt before the folder is removed."""
        fault = write_fault(self.folder if self.folder.exists() else self._final.parent)
        said = f"the checkpoint cannot be written: {str(error).partition(chr(10))[0]}"
        return OSError(fault.errno, said) if fault else OSError(said)

    def complete(self, write: Callable[[], None], then: Callable[[], None]) -> None:
        """Writes the content, then makes it a checkpoint.

        Args:
            write: writes this rank's part into `folder`.
            then: rank 0 calls it when the checkpoint is there, while the others wait.

        Raises:
            OSError: on every rank, if any rank cannot write (a full disk).
        """
        self.attempt(lambda: self._write(write))
        self._ranks.barrier()
        seen = self.attempt(lambda: names_in(self.folder))
        names = all_of(self._ranks.gather(seen))
        mine = self.attempt(lambda: self._measure(share(names, self._ranks)))
        listed = [entry for part in self._ranks.gather(mine) for entry in part]
        self.attempt(lambda: self._publish(listed, then))

    def _write(self, write: Callable[[], None]) -> None:
        write()
        if self._ranks.is_first:
            write_synced(self.folder / STATE, asdict(self._state))

    def _measure(self, names: Iterable[str]) -> list[dict[str, Any]]:
        """Name, size and sha256 of files, after they are synced to disk."""
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
    """The files of a checkpoint that this node sees, without its list.

    On NFS, files of other nodes may not be visible yet. Files that this node made are.
    """
    return [
        p.relative_to(folder).as_posix()
        for p in folder.rglob("*")
        if p.is_file() and p != folder / FILES
    ]


def all_of(parts: Iterable[Iterable[str]]) -> list[str]:
    """The files that any rank sees, sorted. Each file was made by one of the ranks."""
    return sorted({name for part in parts for name in part})


def share(names: list[str], ranks: Ranks) -> list[str]:
    """The part of `names` that this rank handles. With the same names on all ranks, each has one
    rank.
    """
    return names[ranks.rank :: ranks.world_size]


def discard(folder: Path) -> str | None:
    """Removes a checkpoint, whole or torn. Half a checkpoint never has a checkpoint's name.

    Returns:
        Why a part is still there; None if nothing is. On NFS this is no fault: a deleted file that
        is open stays as `.nfs...` until it is closed. What stays has another name, unless the
        rename failed.
    """
    aside, why = folder, ""
    try:
        if folder.suffix != GONE:
            aside = next(
                p
                for n in count()
                if not (p := folder.with_name(f"{folder.name}.{n}{GONE}")).exists()
            )
            folder.replace(aside)
        shutil.rmtree(aside)
    except OSError as error:
        why = str(error.strerror or error)
        if aside.suffix == GONE:
            shutil.rmtree(aside, ignore_errors=True)  # what remains
    return why if why and (aside.exists() or folder.exists()) else None


def measured(path: Path) -> dict[str, Any]:
    """Size in bytes and sha256 of a file."""
    found = hash_file(path)
    return {"size": found.size, "sha256": found.sha256}


def write_synced(path: Path, document: dict[str, Any]) -> None:
    """Writes a JSON file and syncs it to disk."""
    with open(path, "w", encoding="utf-8") as file:
        json.dump(document, file, indent=1, sort_keys=True)
        file.flush()
        os.fsync(file.fileno())
