"""What the checks of a run find: errors, warnings, notes and facts, all of them at once.

A check yields `Finding`s. A `StageError` that it raises is an error too, and the end of that check.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, ParamSpec

from runner.errors import (
    DamageError,
    IncompleteError,
    PolicyError,
    StageError,
    UsageError,
    human_count,
    join_errors,
)

FAULTS = "faults, each of which would end this run"
FORMAT = 1  # of the JSON document
P = ParamSpec("P")


@dataclass(frozen=True)
class Finding:
    """One thing that a person should know before the run starts.

    Attributes:
        level: `error`: the run cannot work; `warning`: it may not; `note`: good to know; `fact`: a
            line about the run; `detail`: one that `train` prints with -v only.
        message: what and where.
        remedy: the command or the line that fixes it; empty only for notes, facts and details.
        exit_code: of an error, as if it were the only one; else 0.
    """

    level: Literal["error", "warning", "note", "fact", "detail"]
    message: str
    remedy: str = ""
    exit_code: int = 0

    @property
    def is_line(self) -> bool:
        """Whether it is a line about the run, and nothing to act on."""
        return self.level in ("fact", "detail")

    def __str__(self) -> str:
        """Returns the finding as printed, without the word `error`."""
        text = f"{self.level}: {self.message}"
        if self.is_line or self.level == "error":
            text = self.message
        return f"{text}\n  -> {self.remedy}" if self.remedy else text

    def to_json(self) -> dict[str, Any]:
        """Returns the finding as `runner check --json` prints it."""
        return {
            "level": self.level,
            "message": self.message,
            "remedy": self.remedy,
            "exit_code": self.exit_code,
        }

    def as_error(self) -> StageError:
        """Returns an error as the exception that it was."""
        for kind in (UsageError, DamageError, PolicyError, IncompleteError):
            if kind.exit_code == self.exit_code:
                return kind(self.message, self.remedy)
        return StageError(self.message, self.remedy, self.exit_code)


def warning(message: str, remedy: str) -> Finding:
    """What may end the run."""
    return Finding("warning", message, remedy)


def note(message: str, remedy: str = "") -> Finding:
    """What is good to know."""
    return Finding("note", message, remedy)


def fact_line(message: str) -> Finding:
    """A line about the run."""
    return Finding("fact", message)


def usage_error(message: str, remedy: str) -> Finding:
    """What cannot work as it is asked for: a `UsageError`."""
    return Finding("error", message, remedy, UsageError.exit_code)


def errors_of(error: StageError) -> Iterator[Finding]:
    """What ends the run: each of the faults that an error lists."""
    for part in error.parts or (error,):
        yield Finding("error", part.message, part.remedy, part.exit_code)


def attempt(
    check: Callable[P, Iterable[Finding] | None], *arguments: P.args, **named: P.kwargs
) -> Iterator[Finding]:
    """Yields what a check finds; where it raises, the error: what comes after it is still done."""
    try:
        yield from check(*arguments, **named) or ()
    except StageError as error:
        yield from errors_of(error)


def without_repeats(found: Iterable[Finding]) -> list[Finding]:
    """Findings in their order; each error once: two checks can meet the same fault."""
    kept, said = list[Finding](), set[str]()
    for finding in found:
        if finding.level == "error":
            if str(finding) in said:
                continue
            said.add(str(finding))
        kept.append(finding)
    return kept


def errors_in(found: Iterable[Finding]) -> list[StageError]:
    """The errors among findings."""
    return [finding.as_error() for finding in found if finding.level == "error"]


def raise_errors(found: Iterable[Finding]) -> None:
    """Raises the errors among findings: the error itself if it is the only one.

    Raises:
        StageError: there are errors.
    """
    if errors := errors_in(found):
        raise join_errors(errors, FAULTS)


def report(found: Sequence[Finding], say: Callable[[str], None], *, verbose: bool = True) -> None:
    """Says what was found, where nothing ends the run: lines first, then what to act on.

    Args:
        verbose: whether the details are said, too.

    Raises:
        StageError: there are errors.
    """
    raise_errors(found)
    for finding in in_order(found):
        if verbose or finding.level != "detail":
            say(str(finding))


def in_order(found: Iterable[Finding]) -> list[Finding]:
    """Facts, then details, then warnings and notes, each kind in the order in which it was found.

    Errors are left out.
    """
    order = {"fact": 0, "detail": 1, "warning": 2, "note": 2}
    known = [finding for finding in found if finding.level in order]
    return sorted(known, key=lambda finding: order[finding.level])


def except_warnings(found: Iterable[Finding]) -> str:
    """`, except 2 warnings above`; empty: there is none."""
    number = sum(finding.level == "warning" for finding in found)
    return f", except {human_count(number, 'warning')} above" if number else ""


def document(found: Sequence[Finding], lines: Sequence[str] = (), **facts: Any) -> dict[str, Any]:
    """Returns what was found as `runner check --json` prints it.

    Args:
        lines: facts that were found before.
        facts: more keys, such as the run file's path.
    """
    errors = errors_in(found)
    error = join_errors(errors, FAULTS) if errors else None
    acted = [f for f in found if f.level == "error"]
    acted += [f for f in in_order(found) if not f.is_line]
    return {
        "format": FORMAT,
        "passes": error is None,
        "exit_code": error.exit_code if error else 0,
        **facts,
        "findings": [finding.to_json() for finding in acted],
        "facts": [*lines, *(str(f) for f in in_order(found) if f.is_line)],
    }
