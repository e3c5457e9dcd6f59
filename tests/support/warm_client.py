"""Stands for a process that tests.support.warm forks. Imports nothing of ours: it starts often."""

from __future__ import annotations

import array
import contextlib
import json
import os
import resource
import signal
import socket
import sys
import time
from types import FrameType
from typing import NoReturn

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
"""Variables of launchers: torchrun and ours, Open MPI, MPICH."""
WITH_TORCH = (
    b"look_with_torch",
    b"count_parameters",
    b"_load_export",
    b"_run_kernels",
    b"_write_random",
)
"""In the question to a child that imports torch."""
LIMITS = (
    resource.RLIMIT_AS,
    resource.RLIMIT_CPU,
    resource.RLIMIT_DATA,
    resource.RLIMIT_FSIZE,
)
HEADER = 8
"""Bytes of a message's length."""
FILES = 4
"""At most so many files are handed on: standard ones, and a child's for its answer."""


def client(python: str, sockets: str, here: list[object]) -> NoReturn:
    """Asks for a fork, or becomes the real Python.

    Args:
        python: the real one.
        sockets: the folder of the servers' sockets.
        here: the servers' `surroundings`.
    """
    argv, files = sys.argv[1:], [0, 1, 2]
    if _is_child(argv) and surroundings() == here:
        question = sys.stdin.buffer.read()
        files = [os.memfd_create("question"), 1, 2, int(argv[-2])]
        os.write(files[0], question)
        os.lseek(files[0], 0, os.SEEK_SET)
        argv = argv[argv.index("-c") :]
        needs_torch = any(name in question for name in WITH_TORCH)
        connection = _connect(f"{sockets}/{'torch' if needs_torch else 'light'}")
    elif _is_for_the_server(argv):
        connection = _connect(f"{sockets}/torch")
    else:
        me = sys.argv[0]  # by it Python finds its packages
        os.execv(python, [me, *argv])
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
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    wish = {
        "argv": argv,
        "environ": dict(os.environ),
        "folder": os.getcwd(),  # noqa: PTH109
        "python": sys.argv[0],
        "limits": [(kind, resource.getrlimit(kind)) for kind in LIMITS],
    }
    text = json.dumps(wish).encode()
    connection.sendmsg(
        [len(text).to_bytes(HEADER, "big")],
        [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))],
    )
    connection.sendall(text)
    answers = connection.makefile("r")
    rank = int(answers.readline())
    for came in early:
        os.kill(rank, came)
    code = int(answers.readline())
    if code < 0:
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def surroundings() -> list[object]:
    """What a fork of the server does not take over from who started the client."""
    spaces = [os.readlink(f"/proc/self/ns/{name}") for name in ("mnt", "net")]  # noqa: PTH115
    limits = [resource.getrlimit(kind) for kind in LIMITS]
    return [os.geteuid(), *spaces, *limits]


def _is_child(argv: list[str]) -> bool:
    return not _is_changed() and any("run_module('runner.child'" in word for word in argv)


def _is_for_the_server(argv: list[str]) -> bool:
    if len(argv) < 2:
        return False
    if argv[0] == "-m" and argv[1].startswith("tests."):
        return True
    is_rank = any(name in os.environ for name in RANKS)
    is_runner = argv[0].endswith("/bin/runner") or argv[:2] == ["-m", "runner"]
    return is_runner and is_rank and not _is_changed()


def _is_changed() -> bool:
    """Variables by which a test changes what is imported need a new process."""
    return "PYTHONPATH" in os.environ or "LD_PRELOAD" in os.environ


def _connect(meeting: str) -> socket.socket:
    deadline = time.monotonic() + 120
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(meeting)
            return connection
        except (FileNotFoundError, ConnectionRefusedError):
            if time.monotonic() > deadline or not _is_there(meeting):
                raise
            time.sleep(0.05)


def _is_there(meeting: str) -> bool:
    """Whether the server of a socket runs. Its log is beside it."""
    with contextlib.suppress(OSError):
        number = open(f"{meeting}.pid").read()  # noqa: SIM115
        return open(f"/proc/{number}/stat").read().rpartition(")")[2].split()[0] != "Z"
    return False
