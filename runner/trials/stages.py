"""A rehearsal as a whole: its stages with their seconds, and its hidden folder.

The folder is beside the run folder, on the same disk, and is removed afterwards.
"""

from __future__ import annotations

import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from runner.errors import StageError
from runner.processes import is_alive

Say = Callable[[str], None]


@dataclass
class Stage:
    """A stage under way; its words are printed when it has ended."""

    words: str = ""


@dataclass
class Stages:
    """All stages so far. Each is printed when it ends.

    Attributes:
        say: prints a line.
        names: of those that have ended.
    """

    say: Say
    names: list[str] = field(default_factory=list)
    _since: float = field(default_factory=time.monotonic)
    _began: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Since the first stage began."""
        return time.monotonic() - self._began

    def end(self, name: str, words: str = "") -> None:
        """Notes that a stage has ended, which began when the one before ended."""
        now = time.monotonic()
        self.say(f"  {name:<9} {now - self._since:6.1f} s  {words}".rstrip())
        self.names.append(name)
        self._since = now

    @contextmanager
    def of(self, name: str) -> Iterator[Stage]:
        """A stage that ends with the block; an error says in which stage it was.

        Raises:
            StageError: the block raised it.
        """
        stage = Stage()
        try:
            yield stage
        except StageError as error:
            said = f"rehearsal, {name}: {error.message}"
            found = type(error)(said, error.remedy, error.exit_code)
            found.parts = error.parts
            raise found from None
        self.end(name, stage.words)


TRIES, PAUSE_S = 50, 0.1
"""Ranks that are being killed may still write for a moment."""


@contextmanager
def hidden_folder(run_folder: Path) -> Iterator[Path]:
    """Makes a folder beside the run folder, and removes it however the block ends.

    Folders above it that had to be made are removed too, and what killed rehearsals left.

    Args:
        run_folder: need not exist.

    Raises:
        OSError: it cannot be made.
    """
    prefix = f".{run_folder.name}.rehearsal-{platform.node()}-"
    _remove_abandoned(run_folder.parent, prefix)
    folder = run_folder.parent / f"{prefix}{os.getpid()}"
    made = [above for above in folder.parents if not above.exists()]
    try:
        folder.mkdir(mode=0o700, parents=True)
        yield folder
    finally:
        _remove(folder)
        for above in made:  # the innermost first
            with suppress(OSError):  # something else is in it now
                above.rmdir()


def _remove(folder: Path) -> None:
    for _ in range(TRIES):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(PAUSE_S)


def _remove_abandoned(parent: Path, prefix: str) -> None:
    """Removes what rehearsals of this machine left that were killed."""
    for left in parent.glob(f"{prefix}*"):
        process = left.name.removeprefix(prefix)
        if process.isdecimal() and not is_alive(int(process)):
            _remove(left)
