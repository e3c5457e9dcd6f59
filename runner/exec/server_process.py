"""Runs a server for as long as a program runs.

`serve_beside` forks a process without a terminal, and without a parent that waits for it. It serves
from a thread, and watches the calling process by its number. When that process ends for any reason,
it ends too. So the caller can become the program (`exec`) and keep its exit code, signals and
streams.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable

from runner.processes import birth_time, is_alive

LOOK_EVERY_S = 0.5  # one look is one stat of /proc
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def serve_beside(serve: Callable[[], None], afterwards: Callable[[], None]) -> None:
    """Starts a server that runs as long as the calling process, also after its `exec`.

    Args:
        serve: serves until its process ends. What it prints to stderr comes to ours.
        afterwards: called in the server's process when the program has ended.
    """
    program = os.getpid()
    born = birth_time(program)  # a program keeps it when it becomes another
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    # If this child returned, it would run the caller's code a second time.
    try:
        # A new session: Ctrl-C is for the program, which may read a file while it cleans up.
        os.setsid()
        if not os.fork():
            _supervise(serve, lambda: is_alive(program, born), afterwards)
    finally:
        os._exit(0)


def _supervise(
    serve: Callable[[], None], runs: Callable[[], bool], afterwards: Callable[[], None]
) -> None:
    # Slurm signals each process of a step, and the program has minutes to save.
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    # A reader of the caller's stdout must not wait for this process.
    os.dup2(2, 1)
    os.chdir("/")
    threading.Thread(target=serve, daemon=True).start()
    while runs():
        time.sleep(LOOK_EVERY_S)
    afterwards()
