"""What the checks of a run find: errors, warnings and notes, all of them at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, ParamSpec, TypeVar

from runner.errors import StageError, join_errors

FAULTS = "faults, each of which would end this run"
P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Finding:
    """One thing that a person should know before the run starts.

    Attributes:
        level: `error`: the run cannot work; `warning`: it may not; `note`: good to know.
        message: what and where.
        remedy: the command or the line that fixes it; empty only for notes.
        exit_code: of an error, as if it were the only one; else 0.
    """

    level: Literal["error", "warning", "note"]
    message: str
    remedy: str = ""
    exit_code: int = 0

    def __str__(self) -> str:
        """Returns the finding as printed, without the word `error`."""
        text = self.message if self.level == "error" else f"{self.level}: {self.message}"
        return f"{text}\n  -> {self.remedy}" if self.remedy else text

    def to_json(self) -> dict[str, Any]:
        """Returns the finding as `runner check --json` prints it."""
        return {
            "level": self.level,
            "message": self.message,
            "remedy": self.remedy,
            "exit_code": self.exit_code,
        }


def finding_of(error: StageError) -> Finding:
    """Returns an error as a finding."""
    return Finding("error", error.message, error.remedy, error.exit_code)


@dataclass
class Findings:
    """Collects what is found. An error ends one check only, not those after it.

    Attributes:
        errors: what ends the run.
        others: warnings and notes.
        lines: facts about the run, for printing.
        details: more of them, which `train` prints with -v only.
        has_cluster: False where sbatch said that this machine belongs to no cluster.
    """

    errors: list[StageError] = field(default_factory=list)
    others: list[Finding] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    details: list[str] = field(default_factory=list)
    has_cluster: bool = True

    def warn(self, message: str, remedy: str) -> None:
        """Adds what may end the run."""
        self.others.append(Finding("warning", message, remedy))

    def note(self, message: str, remedy: str = "") -> None:
        """Adds what is good to know."""
        self.others.append(Finding("note", message, remedy))

    def add(self, more: Findings) -> None:
        """Adds all that another check found."""
        for error in more.errors:
            self.error(error)
        self.others += more.others
        self.lines += more.lines
        self.details += more.details

    def error(self, error: StageError) -> None:
        """Adds what ends the run, once: two checks can meet the same fault."""
        self.errors += [
            part for part in error.parts or (error,) if str(part) not in map(str, self.errors)
        ]

    def attempt(self, check: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T | None:
        """Calls a check; an error is kept, and the result is None then."""
        with self.keeping():
            return check(*arguments, **named)
        return None

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Keeps an error that is raised in this context."""
        try:
            yield
        except StageError as error:
            self.error(error)

    def raise_errors(self) -> None:
        """Raises what was found: the error itself if it is the only one.

        Raises:
            StageError: there are errors.
        """
        if self.errors:
            raise join_errors(self.errors, FAULTS)

    def report(self, say: Callable[[str], None], *, verbose: bool = True) -> None:
        """Says what was found, where nothing ends the run.

        Args:
            verbose: whether the details are said, too.

        Raises:
            StageError: as for `raise_errors`.
        """
        self.raise_errors()
        details = self.details if verbose else []
        for line in (*self.lines, *details, *map(str, self.others)):
            say(line)
