"""Checkpoints: which are written and kept, and which one a run goes on from.

`writing` makes each whole or not there. What is resumed is the newest step whose every byte is as listed; one that is
not is named and passed over. Asynchronous: the ranks copy what they hold and go on; a thread in each writes the copy,
and the threads agree among themselves.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from runner.config import CheckpointConfig
from runner.errors import DamageError
from runner.resume import TrainingState, newest_first, read_state
from runner.training.background import Background
from runner.training.engines.base import Engine
from runner.training.ranks import Ranks
from runner.training.writing import FILES, LATEST, Writing, measured, share, write_synced

BEST = "best.json"


class Checkpoints:
    """The checkpoints of one run folder. Every method is called by all ranks."""

    def __init__(
        self,
        folder: Path,
        config: CheckpointConfig,
        ranks: Ranks,
        say: Callable[[str], None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder, self._config, self._ranks, self._say, self._now = folder, config, ranks, say, now
        self._saved_at = now()
        self._writers = Ranks() if config.asynchronous else ranks
        self._background = Background()
        self._told = ""

    def is_due(self, step: int) -> bool:
        """Whether one is to be written after this step: by number, or by the clock of the rank that is ahead."""
        if isinstance(self._config.every, int):
            return step % self._config.every == 0
        return self._ranks.any(self._now() - self._saved_at >= (self._config.seconds or 0))

    def mark_best(self, step: int, value: float) -> bool:
        """Notes the validation loss of a step. Whether it is the lowest so far: then its checkpoint must be written.

        The checkpoint of the best step is kept beside the newest ones, where the run file has `best: true`.
        """
        if self._config.best:
            self.finish()  # the best one so far counts once it is whole
        known = self._ranks.gather(_read_best(self._folder))[0]
        is_best = self._config.best and (known is None or value < known[1])
        if is_best and self._ranks.is_first:
            temporary = self._folder / f"{BEST}.tmp"
            write_synced(temporary, {"step": step, "validation_loss": value})
            temporary.replace(self._folder / BEST)
        return is_best

    def save(self, engine: Engine, state: TrainingState) -> None:
        """Writes a checkpoint, then drops the oldest beyond `keep`; asynchronous: begins to, after the one before.

        Raises:
            OSError: on every rank, if any rank cannot write (a full disk), or could not write the one before: older
                checkpoints are untouched.
        """
        self.finish()
        began = self._now()
        final = self._folder / f"step-{state.step}"
        writing = Writing(final, state, self._writers)
        writing.begin()
        if self._config.asynchronous:
            copies: list[Callable[[], None]] = []
            writing.attempt(lambda: copies.append(engine.stage(writing.folder, self._writers.group)))

            def work() -> None:
                writing.complete(copies.pop(), lambda: self._drop_old(final))
                self._told = f"checkpoint {final.name} is whole ({self._now() - began:.1f} s, beside training)"

            self._background.start(work)
        else:
            writing.complete(lambda: engine.save(writing.folder), lambda: self._drop_old(final))
        self._saved_at = self._now()

    def have_failed(self) -> bool:
        """Whether this rank knows that the one being written will not be whole. Asked on each rank by itself."""
        if self._background.is_over and not self._background.has_failed:
            self.finish()
        return self._background.has_failed

    def finish(self) -> None:
        """Waits until the one that is being written is whole.

        Raises:
            OSError: on every rank, if it could not be written.
        """
        if self._background.finish():
            self._say(self._told)

    def _drop_old(self, newest: Path) -> None:
        (self._folder / LATEST).write_text(f"{newest.name}\n")
        best = _read_best(self._folder) if self._config.best else None
        for old in newest_first(self._folder)[self._config.keep :]:
            if best is None or old.name != f"step-{best[0]}":
                shutil.rmtree(old)
        for torn in self._folder.glob("step-*.tmp"):
            shutil.rmtree(torn, ignore_errors=True)

    def newest_valid(self) -> tuple[Path, TrainingState] | None:
        """The newest checkpoint that is whole; None if none was ever written.

        Raises:
            DamageError: there are checkpoints, and none is whole: beginning anew would overwrite what they led to.
        """
        folders = self._ranks.gather(newest_first(self._folder))[0]
        for folder in folders:
            problem = self._problem_with(folder)
            if problem is None:
                return folder, read_state(folder)
            self._say(f"checkpoint {folder.name} is passed over: {problem}")
        if folders:
            raise DamageError(
                f"{self._folder}: none of its {len(folders)} checkpoints is as it was written.",
                f"To begin anew from step 0: another --output, or rm -r {self._folder}",
            )
        return None

    def _problem_with(self, folder: Path) -> str | None:
        """Why a checkpoint cannot be used; the ranks hash it together and all get the same answer."""
        mine: str | None = None
        try:
            listed = {entry["path"]: entry for entry in json.loads((folder / FILES).read_text())["files"]}
            there = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()} - {FILES}
            if there != set(listed):
                odd = sorted(there ^ set(listed))[0]
                mine = f"{odd} is {'missing' if odd in listed else 'not in its list'}"
            else:
                for path in share(folder, self._ranks):
                    name = path.relative_to(folder).as_posix()
                    if measured(path) != {key: listed[name][key] for key in ("size", "sha256")}:
                        mine = f"{name} is not as it was written"
                read_state(folder)
        except (OSError, ValueError, KeyError, TypeError) as error:
            mine = f"it cannot be read ({error})"
        return next((problem for problem in self._ranks.gather(mine) if problem), None)


def _read_best(folder: Path) -> tuple[int, float] | None:
    """The best step and its validation loss, if one was noted and its checkpoint was written."""
    try:
        document = json.loads((folder / BEST).read_text(encoding="utf-8"))
        step, value = int(document["step"]), float(document["validation_loss"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return (step, value) if (folder / f"step-{step}").is_dir() else None
