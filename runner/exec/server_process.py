"""Runs a server for as long as a program runs.

`start_server` forks a supervisor, a process without a terminal and without a parent that waits for
it. The supervisor starts `stage serve` and watches the calling process by its number. When that
process ends for any reason, the supervisor ends the server. So the caller can become the program
(`exec`) and keep its exit code, signals and streams.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence

from runner.errors import isolated
from runner.ranks.processes import birth_time, die_with_parent, is_alive

LOOK_EVERY_S = 0.5
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def stage_command(*arguments: str) -> list[str]:
    """The command for `stage ARGUMENTS`, isolated from the current folder and from PYTHONPATH."""
    return isolated("stage", *arguments)


def start_server(argv: Sequence[str], afterwards: Callable[[], None]) -> int:
    """Starts a server that runs as long as the calling process, also after its `exec`.

    Args:
        argv: a command that prints its first line when it is ready. Its stderr is ours.
        afterwards: called in the supervisor when the server and the program have ended.

    Returns:
        A file descriptor to read from: the server's first line, or `exit N` if it ended instead.
    """
    reader, writer = os.pipe()
    program = _Watched(os.getpid())
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        os.close(writer)
        program.close()
        os.waitpid(child, 0)
        return reader
    # If this child returned, it would run the caller's code a second time.
    code = 1
    try:
        os.close(reader)
        # A new session: Ctrl-C is for the program, which may read a file while it cleans up.
        os.setsid()
        if os.fork():
            os._exit(0)
        code = _supervise(argv, program, writer, afterwards)
    except OSError as error:
        print(f"runner exec: {argv[0]}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(code)


def read_line(reader: int) -> str:
    """Waits for the line that comes through the descriptor of `start_server`."""
    with open(reader, encoding="utf-8") as file:
        return file.readline().rstrip("\n")


def _supervise(
    argv: Sequence[str], program: _Watched, writer: int, afterwards: Callable[[], None]
) -> int:
    # Slurm signals each process of a step, and the program has minutes to save. The server inherits
    # this.
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    # A reader of the caller's stdout must not wait for this process.
    os.dup2(2, 1)
    server = subprocess.Popen(
        list(argv),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        cwd="/",
        preexec_fn=die_with_parent(),
    )
    assert server.stdout is not None
    first = server.stdout.readline().decode("utf-8", "replace").strip()
    # Otherwise a server that prints more than a pipe holds would wait for a reader.
    threading.Thread(target=server.stdout.read, daemon=True).start()
    with open(writer, "w", encoding="utf-8") as file, contextlib.suppress(BrokenPipeError):
        file.write(first or f"exit {server.wait()}")
    while first and program.runs():
        if server.poll() is not None:
            print(
                f"runner exec: the bundle's server ended ({server.returncode}); names on the Hub "
                "no longer work",
                flush=True,
            )
            break
    server.kill()
    server.wait()
    afterwards()
    return 0


class _Watched:
    """A process that may end, be killed, or become another program."""

    def __init__(self, pid: int) -> None:
        self._pid, self._born = pid, birth_time(pid)
        try:
            self._handle: int | None = os.pidfd_open(pid)  # type: ignore[attr-defined,unused-ignore]
        except (AttributeError, OSError):  # no Linux, or one before 5.3
            self._handle = None

    def close(self) -> None:
        if self._handle is not None:
            os.close(self._handle)

    def runs(self) -> bool:
        """Waits at most `LOOK_EVERY_S` for its end; whether it still runs then."""
        if self._handle is not None:
            return not select.select([self._handle], [], [], LOOK_EVERY_S)[0]
        time.sleep(LOOK_EVERY_S)
        return is_alive(self._pid, self._born)
