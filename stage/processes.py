"""SIGTERM and SIGHUP as an exception.

By default SIGTERM (`kill`, the end of a job) and SIGHUP (a closed terminal) end a process at once:
without a message, and temporary folders and child processes remain. As an exception they do not.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_AGAIN_S = 0.01  # by then the callback that dropped a signal has returned
_ENDING = (signal.SIGTERM, signal.SIGHUP)


class Ended(BaseException):
    """A signal asked this process to end. It is not an `Exception`, so that no handler catches it.

    Args:
        number: of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number
        self.name = signal.Signals(number).name
        self.exit_code = 128 + number  # as a shell reports it


@contextmanager
def ending_signals() -> Iterator[None]:
    """Inside it, SIGTERM and SIGHUP raise `Ended` in the main thread.

    They do so once, so that a second signal does not stop the clean-up: `timeout` and Slurm signal
    a process and its group. A signal that was ignored before (`nohup`) stays ignored. A forked
    child of ours ends without a message.

    Python drops what a signal raises in a callback of its own (of a weak reference at each import,
    `__del__`): such a signal, Ctrl-C too, is delivered again.
    """
    owner, came = os.getpid(), False
    hook = sys.unraisablehook

    def deliver_again(dropped: sys.UnraisableHookArgs) -> None:
        nonlocal came
        error = dropped.exc_value
        if not isinstance(error, KeyboardInterrupt | Ended):
            hook(dropped)
            return
        came = False
        number = error.number if isinstance(error, Ended) else signal.SIGINT
        main = threading.main_thread().ident or 0
        # Not at once: the callback has not returned.
        threading.Timer(_AGAIN_S, lambda: signal.pthread_kill(main, number)).start()

    def end(number: int, frame: FrameType | None) -> None:
        nonlocal came
        if os.getpid() != owner:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif not came:
            came = True
            raise Ended(number)

    before = {number: signal.getsignal(number) for number in _ENDING}
    ours = [number for number, handler in before.items() if handler is signal.SIG_DFL]
    try:
        for number in ours:
            signal.signal(number, end)
    except ValueError:  # Python lets only the main thread have handlers
        ours = []
    sys.unraisablehook = deliver_again
    try:
        yield
    finally:
        sys.unraisablehook = hook
        for number in ours if not came else ():  # the second may still be on its way
            signal.signal(number, signal.SIG_DFL)
