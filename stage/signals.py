"""Ended from outside: `kill`, the end of a job, a closed terminal become an exception, so that what is at work unwinds.

Left alone, SIGTERM and SIGHUP end a process on the spot: no word, temporary folders stay, and so do child processes.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_ENDING = (signal.SIGTERM, signal.SIGHUP)


class Ended(BaseException):
    """A signal asked this process to end. No `Exception` and no Ctrl-C: nothing on the way takes it for its own.

    Args:
        number: of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.name = signal.Signals(number).name
        self.exit_code = 128 + number  # what a shell reports of a process that a signal ended


@contextmanager
def told_to_end() -> Iterator[None]:
    """While it lasts, SIGTERM and SIGHUP raise `Ended` in the main thread: once, so that cleaning up is not cut short.

    `timeout` and Slurm signal a process and its group, so it comes twice. A signal that was ignored before (`nohup`)
    stays ignored; a forked child of ours ends without a word.
    """
    owner, came = os.getpid(), False

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
    try:
        yield
    finally:
        for number in ours if not came else ():  # the second may still be on its way
            signal.signal(number, signal.SIG_DFL)
