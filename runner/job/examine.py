"""Runs a table of checks on a run: each check says which facts it needs, and yields findings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from runner.errors import StageError
from runner.job.facts import Facts, NotKnownError, fact
from runner.job.findings import Finding, errors_of, without_repeats

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
