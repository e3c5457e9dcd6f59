"""Several things at once, and one failure: the first, which ends the others soon."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import TypeVar

from stage.sources.retry import Stopped

S = TypeVar("S")
T = TypeVar("T")


def together(work: Callable[[S], T], things: Iterable[S], at_once: int, stop: Callable[[], None]) -> list[T]:
    """Does `work` with each thing, in threads; results in the order given.

    Args:
        stop: tells work under way to end soon; called on the first failure and on Ctrl-C.

    Raises:
        Exception: whatever failed first.
        KeyboardInterrupt: everything was stopped from outside.
    """
    with ThreadPoolExecutor(max_workers=at_once) as pool:
        futures: list[Future[T]] = [pool.submit(work, thing) for thing in things]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            if any(not f.done() or f.cancelled() or f.exception() for f in futures):
                stop()
                pool.shutdown(wait=True, cancel_futures=True)
    errors = [error for f in futures if not f.cancelled() and (error := f.exception())]
    for error in errors:
        if not isinstance(error, Stopped):
            raise error
    if errors:
        raise KeyboardInterrupt
    return [future.result() for future in futures]
