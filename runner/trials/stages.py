"""The stages of a rehearsal as they end, printed with their seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from runner.errors import StageError

Say = Callable[[str], None]


@dataclass
class Stage:
    """One stage that has ended."""

    name: str
    seconds: float = 0.0
    words: str = ""

    def __str__(self) -> str:
        return f"  {self.name:<9} {self.seconds:6.1f} s  {self.words}".rstrip()


@dataclass
class Stages:
    """All stages so far. Each is printed when it ends.

    Attributes:
        say: prints a line.
    """

    say: Say
    ended: list[Stage] = field(default_factory=list)
    _since: float = field(default_factory=time.monotonic)
    _began: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Since the first stage began."""
        return time.monotonic() - self._began

    def end(self, name: str, words: str = "") -> None:
        """Notes that a stage has ended, which began when the one before ended."""
        now = time.monotonic()
        self.ended.append(Stage(name, now - self._since, words))
        self._since = now
        self.say(str(self.ended[-1]))

    @contextmanager
    def of(self, name: str) -> Iterator[Stage]:
        """A stage that ends with the block; an error says in which stage it was.

        Raises:
            StageError: the block raised it.
        """
        stage = Stage(name)
        try:
            yield stage
        except StageError as error:
            said = f"rehearsal, {name}: {error.message}"
            found = type(error)(said, error.remedy, error.exit_code)
            found.parts = error.parts
            raise found from None
        self.end(name, stage.words)
