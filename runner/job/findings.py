"""What the checks of a run find: errors, warnings, notes and facts, all of them at once.

A check is a function of the run that yields `Finding`s. A `StageError` that it raises is an error
too, and the end of that check. `@needs` names the facts that it reads.

Facts are what follows from a run, derived once, when something asks for it: methods with `@fact`.
The first read derives the value and keeps it. A fact that raises a `StageError` raises the same
error at each read; a fact that reads it raises it too. A fact that cannot be known here raises
`NotKnownError`, and so does what follows from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, ParamSpec, TypeVar, overload

from runner.from_stage import (
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


T = TypeVar("T")
F = TypeVar("F", bound="Facts")


class NotKnownError(Exception):
    """A fact cannot be known here. It is no fault of the run: what needs the fact is left out."""


class fact(Generic[T]):
    """Makes a method without arguments a fact of its object, which must be a `Facts`.

    Of the class, it is the fact itself, for `Facts.known`: `run.known(Run.plan)`.
    """

    def __init__(self, derive: Callable[[Any], T]) -> None:
        self._derive = derive
        self.__doc__ = derive.__doc__
        self.name = derive.__name__

    @overload
    def __get__(self, run: None, owner: type) -> fact[T]: ...

    @overload
    def __get__(self, run: Facts, owner: type) -> T: ...

    def __get__(self, run: Facts | None, owner: type) -> fact[T] | T:
        if run is None:
            return self
        # Not a field: a copy with another field (`dataclasses.replace`) has other facts.
        kept: dict[str, Any] = vars(run).setdefault("_kept_facts", {})
        if self.name not in kept:
            try:
                kept[self.name] = self._derive(run)
            except (StageError, NotKnownError) as error:
                kept[self.name] = error  # no fact has an error as its value
        value: Any = kept[self.name]
        if isinstance(value, StageError | NotKnownError):
            # Without the traceback of the first read, which would grow with each read.
            raise value.with_traceback(None)
        found: T = value
        return found


class Facts:
    """An object with facts. What is derived is neither compared, copied nor pickled with it."""

    def known(self, wanted: fact[T]) -> T | None:
        """The value of a fact, where it can be missing; None: it raised, or is not known.

        Args:
            wanted: of the class: `run.known(Run.plan)`.
        """
        try:
            value: T = getattr(self, wanted.name)
        except (StageError, NotKnownError):
            return None
        return value

    def require(self, *wanted: fact[Any]) -> None:
        """Raises what a fact raised, or that it is not known: what is derived next needs it."""
        for one in wanted:
            getattr(self, one.name)

    def given(self: F, wanted: fact[T], value: T) -> F:
        """A copy for which a fact has this value; nothing else is derived for it yet."""
        # Not `copy.copy`: it takes what `__getstate__` gives to other processes.
        made = object.__new__(type(self))
        given = {**vars(self).get("_given", {}), wanted.name: value}
        vars(made).update(vars(self), _given=given, _kept_facts=dict(given))
        return made

    def __getstate__(self) -> dict[str, Any]:
        """The fields: facts may be processes, and are derived again where they are needed."""
        return {k: v for k, v in vars(self).items() if k not in ("_kept_facts", "_given")}


R = TypeVar("R", bound=Facts)
R_contra = TypeVar("R_contra", bound=Facts, contravariant=True)
Find = Callable[[R], Iterator[Finding]]


@dataclass(frozen=True)
class Check(Generic[R_contra]):
    """One check.

    Attributes:
        find: yields what is found about a run; it may raise a `StageError`, an error as well.
        needs: the facts without which there is nothing to check.
    """

    find: Find[R_contra]
    needs: tuple[fact[Any], ...]


def needs(*facts: fact[Any]) -> Callable[[Find[R]], Check[R]]:
    """Makes a function a check that needs these facts: all that it reads, but by `known`."""
    return lambda find: Check(find, facts)


def after(gates: Sequence[fact[Any]], *checks: Check[R]) -> tuple[Check[R], ...]:
    """Checks that mean something only where facts hold, such as a bundle that is not damaged."""
    return tuple(replace(check, needs=(*gates, *check.needs)) for check in checks)


def examine(run: R, checks: Iterable[Check[R]], begin: Iterable[fact[Any]] = ()) -> list[Finding]:
    """Returns what the checks find, in the order of the table; each once: two can meet one fault.

    A check is left out where a fact that it needs raised (its error is found instead), or is not
    known here.

    Args:
        begin: facts that take seconds in another process: they are started before the first check.
    """
    for wanted in begin:
        run.known(wanted)
    found = (finding for check in checks for finding in _found(run, check))
    return list(dict.fromkeys(found))


def _found(run: R, check: Check[R]) -> Iterator[Finding]:
    try:
        run.require(*check.needs)
        yield from check.find(run)
    except NotKnownError:
        return
    except StageError as error:
        yield from errors_of(error)
