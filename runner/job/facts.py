"""Facts: what follows from a run, derived once, when something asks for it; and checks of them.

A class of facts has methods with `@fact`. The first read derives the value and keeps it. A fact
that raises a `StageError` raises the same error at each read; a fact that reads it raises it too.
A fact that cannot be known here raises `NotKnownError`, and so does what follows from it.

A check is a function of the run that yields findings. `@needs` names the facts that it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar, overload

from runner.errors import StageError
from runner.job.findings import Finding, errors_of, without_repeats

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
                kept[self.name] = _Raised(error)
        value: Any = kept[self.name]
        if isinstance(value, _Raised):
            # Without the traceback of the first read, which would grow with each read.
            raise value.error.with_traceback(None)
        found: T = value
        return found


class _Raised:
    """In the place of a value: the error that its derivation raised."""

    def __init__(self, error: StageError | NotKnownError) -> None:
        self.error = error


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
    """Returns what the checks find, in the order of the table; each error once.

    A check is left out where a fact that it needs raised (its error is found instead), or is not
    known here.

    Args:
        begin: facts that take seconds in another process: they are started before the first check.
    """
    for wanted in begin:
        run.known(wanted)
    return without_repeats(finding for check in checks for finding in _found(run, check))


def _found(run: R, check: Check[R]) -> Iterator[Finding]:
    try:
        for wanted in check.needs:
            getattr(run, wanted.name)
        yield from check.find(run)
    except NotKnownError:
        return
    except StageError as error:
        yield from errors_of(error)
