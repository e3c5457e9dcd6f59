"""One piece of work at a time in a thread beside training; what goes wrong in it is told where it is waited for."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Background:
    """Work that goes on while the loop does. Not for two threads to use."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._problem: BaseException | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Begins `work`; what was begun before must have been waited for."""

        def run() -> None:
            try:
                work()
            except BaseException as problem:  # noqa: BLE001 - raised by `finish`, in the thread that trains
                self._problem = problem

        # A daemon: a rank that gives up must not wait for one that waits for a lost rank.
        self._thread = threading.Thread(target=run, name="checkpoint", daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        """Whether something was begun, has ended, and was not waited for yet."""
        return self._thread is not None and not self._thread.is_alive()

    @property
    def has_failed(self) -> bool:
        """Whether it has ended with an error that `finish` will raise."""
        return self._problem is not None

    def finish(self) -> bool:
        """Waits for what was begun. Returns whether there was anything.

        Raises:
            BaseException: what ended it.
        """
        thread, self._thread = self._thread, None
        if thread is None:
            return False
        thread.join()
        problem, self._problem = self._problem, None
        if problem is not None:
            raise problem
        return True
