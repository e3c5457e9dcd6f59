"""Checkpoints: when they are written, which are kept, and which one a run resumes from.

A run resumes from the newest step whose every byte is as listed; a damaged one is named and
skipped.

A checkpoint is whole or not there (`AtomicCheckpoint`). All ranks write into `step-N.tmp/`. When
all are done, they hash the files, rank 0 writes `files.json` (names, sizes, sha256), and one rename
makes it `step-N/`. A kill at any moment leaves a `.tmp` folder that nothing reads. Removal works
the same way: one rename to `.gone`, then the folder is deleted.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from runner.config.engine import CheckpointConfig
from runner.disks import write_fault
from runner.errors import FULL_DISK, OTHER_RUN
from runner.from_stage import DamageError, hash_file, quoted, sync_folder
from runner.run_folder.training_state import (
    BEST,
    STATE,
    TrainingState,
    by_step_newest_first,
    read_best,
    read_state,
)
from runner.training.components.process_group import Ranks
from runner.training.engines.base import Engine

FILES = "files.json"
GONE = ".gone"
LATEST = "latest"
FORMAT = 1  # of files.json
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

    def _make_room(self) -> None:
        """Makes an empty `.tmp` folder; older ones of the same step were damaged or torn."""
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

    def write_whole(self, write: Callable[[], None], then: Callable[[], None]) -> None:
        """Writes the content, then makes it a checkpoint.

        Args:
            write: writes this rank's part into `folder`.
            then: rank 0 calls it when the checkpoint is there, while the others wait.

        Raises:
            OSError: on every rank, if any rank cannot write (a full disk).
        """
        self.attempt(self._make_room)  # the other ranks wait here until it exists
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


RETRY_AFTER_S = 10.0
"""A server of Lustre or NFS that fails over is back after seconds, or after many minutes."""
FULL = (*FULL_DISK, errno.EFBIG)  # EFBIG: `ulimit -f`, or the disk's largest file


class Checkpoints:
    """The checkpoints of one run folder. All ranks call every method."""

    def __init__(
        self,
        folder: Path,
        config: CheckpointConfig,
        ranks: Ranks,
        say: Callable[[str], None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder, self._config, self._ranks = folder, config, ranks
        self._say, self._now = say, now
        self._saved_at = now()

    def is_due(self, step: int, *, ends_epoch: bool = False) -> bool:
        """Whether to write a checkpoint after this step, by its number."""
        every = self._config.every
        return step % every == 0 if isinstance(every, int) else every == "epoch" and ends_epoch

    def is_time(self) -> bool:
        """Whether to write a checkpoint now, by this rank's clock. One rank decides for all."""
        seconds = self._config.seconds
        return seconds is not None and self._now() - self._saved_at >= seconds

    def mark_best(self, step: int, value: float) -> bool:
        """Notes the validation loss of a step.

        With `best: true` in the run file, the checkpoint of the best step is kept beside the newest
        ones.

        Returns:
            Whether the loss is the lowest so far: then the checkpoint of this step must be written.
        """
        known = self._ranks.gather(read_best(self._folder))[0]
        # A best step that is still to come was damaged, and skipped.
        is_best = self._config.best and (known is None or known[0] >= step or value < known[1])
        if is_best and self._ranks.is_first:
            temporary = self._folder / f"{BEST}.tmp"
            write_synced(temporary, {"step": step, "validation_loss": value})
            temporary.replace(self._folder / BEST)
        return is_best

    def save(self, engine: Engine, state: TrainingState) -> None:
        """Writes a checkpoint, then removes the oldest beyond `keep`.

        A checkpoint that cannot be removed is reported, and tried again after the next. A
        checkpoint that cannot be written is tried a second time, unless the disk is full: a file
        server may be away for a moment.

        Raises:
            OSError: on every rank, if any rank cannot write (a full disk). Older checkpoints are
                unchanged.
        """
        step, final = state.step, self._folder / f"step-{state.step}"
        writing = AtomicCheckpoint(final, state, self._ranks)

        def write() -> None:
            writing.write_whole(lambda: engine.save(writing.folder), lambda: self.drop_old(step))

        try:
            write()
        except OSError as error:  # the same on every rank
            if error.errno in FULL:
                raise
            self._say(f"checkpoint {final.name}: {error}; one more try in {RETRY_AFTER_S:.0f} s")
            time.sleep(RETRY_AFTER_S)
            write()
        self._saved_at = self._now()

    def drop_old(self, newest: int) -> None:
        """Removes checkpoints that are not among the newest. Rank 0 calls it.

        Args:
            newest: the step that was just written; they are counted down from it.

        A checkpoint of a later step was damaged, and skipped when the run resumed from an earlier
        one. It does not count and is removed. Otherwise each resume would hash it, and if it were
        readable again the run would resume from it, although the metrics were cut back to before
        it.
        """
        (self._folder / LATEST).write_text(f"step-{newest}\n")
        torn = [path for suffix in (".tmp", GONE) for path in self._folder.glob(f"step-*{suffix}")]
        best = read_best(self._folder) if self._config.best else None
        by_step = {
            int(path.name.removeprefix("step-")): path
            for path in by_step_newest_first(self._folder)
        }
        kept = {step for step in by_step if step <= newest}
        kept = {*sorted(kept)[-self._config.keep :], *(kept & {best[0]} if best else ())}
        later = [f"step-{step}" for step in by_step if step > newest]
        if later:
            self._say(
                f"deleted, because step-{newest} is saved and they were damaged: {', '.join(later)}"
            )
        for old in [*(path for step, path in by_step.items() if step not in kept), *torn]:
            if left := discard(old):
                self._say(
                    f"checkpoint {old.name} cannot be removed now ({left}); "
                    "the next one tries again"
                )

    def newest_whole(self) -> tuple[Path, TrainingState] | None:
        """The newest checkpoint that is whole; None if none was ever written.

        Raises:
            DamageError: there are checkpoints, but none is whole. A new start would overwrite the
                results.
        """
        folders = self._ranks.gather(by_step_newest_first(self._folder))[0]
        for folder in folders:
            problem = self.problem_with(folder)
            if problem is None:
                return folder, read_state(folder)
            self._say(f"checkpoint {folder.name} is passed over: {problem}")
        if folders:
            raise DamageError(
                f"{self._folder}: no checkpoint in it is as it was written.",
                f"To start again from step 0: give the run {OTHER_RUN}; or rm -r "
                f"{quoted(self._folder)}",
            )
        return None

    def load_best(self, engine: Engine, step: int) -> int:
        """Loads the weights with the lowest validation loss, if the run file asks for them.

        The run itself stays where it is: if it is asked for more, it resumes from its last
        checkpoint.

        Args:
            engine: has the weights of the last step.
            step: the last one.

        Returns:
            The step whose weights the engine has now.
        """
        if not self._config.best:
            return step
        known = self._ranks.gather(read_best(self._folder))[0]
        if known is None:
            self._say(f"exports the last weights, of step {step}: no evaluation has a checkpoint")
            return step
        best, loss = known
        folder = self._folder / f"step-{best}"
        if problem := self.problem_with(folder):
            self._say(f"exports the last weights, of step {step}: step-{best}, the best: {problem}")
            return step
        which = "the last" if best == step else f"not the last, of step {step}"
        self._say(
            f"exports the weights of step {best}, {which}: the lowest validation loss, "
            f"{loss:.4f}  (checkpoint.best)"
        )
        if best != step:
            engine.load(folder)
        return best

    def problem_with(self, folder: Path) -> str | None:
        """Why a checkpoint cannot be used. The ranks hash it together; all get the same answer."""
        mine: str | None = None
        listed: dict[str, Any] = {}
        seen: list[str] = []
        try:
            listed = {
                entry["path"]: entry for entry in json.loads((folder / FILES).read_text())["files"]
            }
            seen = names_in(folder)
            own = share(sorted(listed), self._ranks)
            wrong = (n for n in own if {"path": n, **measured(folder / n)} != listed[n])
            if name := next(wrong, None):
                mine = f"{name} is not as it was written"
            read_state(folder)
        except FileNotFoundError as error:
            mine = f"{Path(error.filename).relative_to(folder).as_posix()} is missing"
        except (OSError, ValueError, KeyError, TypeError) as error:
            mine = mine or f"it cannot be read ({error})"
        # A file that this node does not list is not missing: it is opened by name.
        if unlisted := [name for name in all_of(self._ranks.gather(seen)) if name not in listed]:
            mine = mine or f"{unlisted[0]} is not in its list"
        return next((problem for problem in self._ranks.gather(mine) if problem), None)
