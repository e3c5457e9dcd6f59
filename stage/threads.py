"""Several pieces of work at once, in threads. The first failure ends the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import TypeVar

S = TypeVar("S")
T = TypeVar("T")


class Stopped(Exception):
    """The work was ended from outside. Work that raises it did not fail."""


def together(
    work: Callable[[S], T],
    things: Iterable[S],
    at_once: int,
    stop: Callable[[], None] = lambda: None,
) -> list[T]:
    """Does `work` with each thing.

    Ctrl-C does not wait for work that is under way: a server may never answer.

    Args:
        things: in the order in which work starts.
        at_once: the number of threads.
        stop: makes work under way raise `Stopped` soon. Called on the first failure and on Ctrl-C.

    Returns:
        The results, in the order of `things`.

    Raises:
        Exception: the first failure.
        KeyboardInterrupt: all work was stopped from outside.
    """
    pool, waited = ThreadPoolExecutor(max_workers=at_once), False
    futures: list[Future[T]] = []
    try:
        futures = [pool.submit(work, thing) for thing in things]
        wait(futures, return_when=FIRST_EXCEPTION)
        waited = True
    finally:
        if not waited or any(not f.done() or f.exception() for f in futures):
            stop()
        # After Ctrl-C no thread is waited for: it may hang in a read from a server that is silent.
        pool.shutdown(wait=waited, cancel_futures=True)
    errors = [error for f in futures if not f.cancelled() and (error := f.exception())]
    for error in errors:
        if not isinstance(error, Stopped):
            raise error
    if errors:
        raise KeyboardInterrupt
    return [future.result() for future in futures]
