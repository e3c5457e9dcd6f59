"""Stands for a process that tests.support.warm forks. Imports nothing of ours: it starts often."""

from __future__ import annotations

import array
import contextlib
import json
import os
import signal
import socket
import sys
import time
from types import FrameType
from typing import NoReturn

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
"""Variables of launchers: torchrun and ours, Open MPI, MPICH."""
HEADER = 8
"""Bytes of a message's length."""


def client(python: str, meeting: str) -> NoReturn:
    """Asks for a fork, or becomes the real Python.

    Args:
        python: the real one.
        meeting: the server's socket.
    """
    if not _is_for_the_server(sys.argv[1:]):
        me = sys.argv[0]  # by it Python finds its packages
        os.execv(python, [me, *sys.argv[1:]])
    connection = _connect(meeting)
    rank = 0
    early: list[int] = []

    def pass_on(number: int, _frame: FrameType | None) -> None:
        if rank:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank, number)
        else:
            early.append(number)

    for number in PASSED_ON:
        signal.signal(number, pass_on)
    wish = {"argv": sys.argv[1:], "environ": dict(os.environ), "folder": os.getcwd()}  # noqa: PTH109
    text = json.dumps(wish).encode()
    files = array.array("i", [0, 1, 2])
    connection.sendmsg(
        [len(text).to_bytes(HEADER, "big")],
        [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)],
    )
    connection.sendall(text)
    answers = connection.makefile("r")
    rank = int(answers.readline())
    for number in early:
        os.kill(rank, number)
    code = int(answers.readline())
    if code < 0:
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _is_for_the_server(argv: list[str]) -> bool:
    if len(argv) < 2:
        return False
    if argv[0] == "-m" and argv[1].startswith("tests."):
        return True
    # Variables by which a test changes what is imported need a new process.
    is_changed = "PYTHONPATH" in os.environ or "LD_PRELOAD" in os.environ
    is_rank = any(name in os.environ for name in RANKS)
    is_runner = argv[0].endswith("/bin/runner") or argv[:2] == ["-m", "runner"]
    return is_runner and is_rank and not is_changed


def _connect(meeting: str) -> socket.socket:
    deadline = time.monotonic() + 120
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(meeting)
            return connection
        except (FileNotFoundError, ConnectionRefusedError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
