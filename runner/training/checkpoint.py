"""Checkpoints: complete or not there.

All ranks write into `step-N.tmp/`; when all are done they hash what lies there, rank 0 writes `files.json` (names,
sizes, sha256), and one rename makes it `step-N/`. A kill at any moment leaves a `.tmp` that nobody reads. What is
resumed is the newest step whose every byte is as listed; one that is not is named and passed over.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from runner.config import CheckpointConfig
from runner.errors import DamageError, human_size, sync_folder
from runner.resume import STATE, TrainingState, newest_first, read_state
from runner.training.engines.base import Engine
from runner.training.ranks import Ranks

FILES = "files.json"
LATEST = "latest"
BEST = "best.json"
FORMAT = 1


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

    def is_due(self, step: int) -> bool:
        """Whether one is to be written after this step: by number, or by the clock of the rank that is ahead."""
        if isinstance(self._config.every, int):
            return step % self._config.every == 0
        return self._ranks.any(self._now() - self._saved_at >= (self._config.seconds or 0))

    def mark_best(self, step: int, value: float) -> bool:
        """Notes the validation loss of a step. Whether it is the lowest so far: then its checkpoint must be written.

        The checkpoint of the best step is kept beside the newest ones, where the run file has `best: true`.
        """
        known = self._ranks.gather(_read_best(self._folder))[0]
        is_best = self._config.best and (known is None or value < known[1])
        if is_best and self._ranks.is_first:
            temporary = self._folder / f"{BEST}.tmp"
            _write_synced(temporary, {"step": step, "validation_loss": value})
            temporary.replace(self._folder / BEST)
        return is_best

    def save(self, engine: Engine, state: TrainingState) -> None:
        """Writes a checkpoint, then drops the oldest beyond `keep`.

        Raises:
            OSError: on every rank, if any rank cannot write (a full disk): older checkpoints are untouched.
        """
        final = self._folder / f"step-{state.step}"
        temporary = final.with_name(f"{final.name}.tmp")
        if self._ranks.is_first:
            shutil.rmtree(temporary, ignore_errors=True)
            shutil.rmtree(final, ignore_errors=True)
            temporary.mkdir(parents=True)
        self._ranks.barrier()
        mine: list[dict[str, Any]] = []
        try:
            self._together(lambda: self._write(engine, state, temporary))
            self._ranks.barrier()
            self._together(lambda: mine.extend(self._measure_share(temporary)))
            listed = [entry for part in self._ranks.gather(mine) for entry in part]
            self._together(lambda: self._finish(temporary, final, listed))
        except OSError:
            if self._ranks.is_first:
                shutil.rmtree(temporary, ignore_errors=True)
            raise
        self._saved_at = self._now()

    def _write(self, engine: Engine, state: TrainingState, folder: Path) -> None:
        engine.save(folder)
        if self._ranks.is_first:
            _write_synced(folder / STATE, asdict(state))

    def _together(self, work: Callable[[], None]) -> None:
        """Runs `work` on all ranks; if it fails on one, it has failed on all."""
        problem: OSError | None = None
        try:
            work()
        except OSError as error:
            problem = error
        except RuntimeError as error:  # torch.save wraps a full disk: "[enforce fail at inline_container.cc:...]"
            if "inline_container" not in str(error) and "write" not in str(error):
                raise
            free = human_size(shutil.disk_usage(self._folder).free)
            problem = OSError(f"the checkpoint cannot be written ({free} free): {str(error).splitlines()[0]}")
        if self._ranks.any(problem is not None):
            raise problem or OSError("another rank could not write its part of the checkpoint")

    def _measure_share(self, folder: Path) -> list[dict[str, Any]]:
        """Name, size and sha256 of this rank's share of the files, made durable."""
        measured = []
        for path in _share(folder, self._ranks):
            with open(path, "rb") as file:
                os.fsync(file.fileno())
            measured.append({"path": path.relative_to(folder).as_posix(), **_measured(path)})
        return measured

    def _finish(self, temporary: Path, final: Path, listed: list[dict[str, Any]]) -> None:
        """Writes the list and makes it a checkpoint; rank 0 does, the others wait for it."""
        if not self._ranks.is_first:
            return
        files = sorted(listed, key=lambda entry: str(entry["path"]))
        _write_synced(temporary / FILES, {"format": FORMAT, "files": files})
        temporary.replace(final)
        sync_folder(self._folder)
        self._drop_old(final)

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
                for path in _share(folder, self._ranks):
                    name = path.relative_to(folder).as_posix()
                    if _measured(path) != {key: listed[name][key] for key in ("size", "sha256")}:
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


def _share(folder: Path, ranks: Ranks) -> list[Path]:
    """The files that this rank looks after; the list itself is nobody's."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p != folder / FILES)
    return files[ranks.rank :: ranks.world_size]


def _measured(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        digest = hashlib.sha256()
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    return {"size": path.stat().st_size, "sha256": digest.hexdigest()}


def _write_synced(path: Path, document: dict[str, Any]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        json.dump(document, file, indent=1, sort_keys=True)
        file.flush()
        os.fsync(file.fileno())
