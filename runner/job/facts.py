"""Facts: what follows from a run, derived once, when something asks for it.

A class of facts has methods with `@fact`. The first read derives the value and keeps it. A fact
that raises a `StageError` raises the same error at each read; a fact that reads it raises it too.
A fact that cannot be known here raises `NotKnownError`, and so does what follows from it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

from runner.errors import StageError

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
        kept = run.kept_facts
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

    @property
    def kept_facts(self) -> dict[str, Any]:
        """What is derived so far, by the names of the facts."""
        # Not a field: a copy with another field (`dataclasses.replace`) has other facts.
        kept: dict[str, Any] = vars(self).setdefault("_kept_facts", {})
        return kept

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
