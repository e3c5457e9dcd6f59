"""Keeps a server beside a program for just as long as the program lives.

`start_server` forks a process that nobody has to wait for: it belongs to no terminal and is nobody's child, starts
`stage serve`, and watches a process by its number. When that process is gone, however it went, so is the server. So the
caller is free to become the program (`exec`), with its own exit code, signals and streams.
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
from pathlib import Path

from runner.ranks import die_with_parent

LOOK_EVERY_S = 0.5
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def stage_command(*arguments: str) -> list[str]:
    """`stage ARGUMENTS` by this interpreter; by its script, so that no folder named `stage` can shadow it."""
    script = Path(sys.executable).parent / "stage"
    return [sys.executable, str(script) if script.is_file() else "-mstage", *arguments]


def start_server(argv: Sequence[str], afterwards: Callable[[], None]) -> int:
    """Starts a server that lives as long as the calling process does, through its `exec` too.

    Args:
        argv: a command that prints its first line when it is ready. Its stderr is ours.
        afterwards: called in the keeper when server and program are gone.

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
    # A process that returns from here would run the caller's code twice.
    code = 1
    try:
        os.close(reader)
        # A session of its own: Ctrl-C is for the program, which may want a file while it cleans up.
        os.setsid()
        if os.fork():
            os._exit(0)
        code = _keep(argv, program, writer, afterwards)
    except OSError as error:
        print(f"runner exec: {argv[0]}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(code)


def read_line(reader: int) -> str:
    """What came through the descriptor of `start_server`; waits for it."""
    with open(reader, encoding="utf-8") as file:
        return file.readline().rstrip("\n")


def _keep(argv: Sequence[str], program: _Watched, writer: int, afterwards: Callable[[], None]) -> int:
    # Slurm signals every process of a step, and the program has minutes to save. The server inherits this.
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    # What reads our caller's output to its end must not wait for us.
    os.dup2(2, 1)
    server = subprocess.Popen(
        list(argv), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, cwd="/", preexec_fn=die_with_parent()
    )
    assert server.stdout is not None
    first = server.stdout.readline().decode("utf-8", "replace").strip()
    # A server with more to say than a pipe holds would wait for a reader.
    threading.Thread(target=server.stdout.read, daemon=True).start()
    with open(writer, "w", encoding="utf-8") as file, contextlib.suppress(BrokenPipeError):
        file.write(first or f"exit {server.wait()}")
    while first and program.lives():
        if server.poll() is not None:
            print(f"runner exec: the bundle's server ended ({server.returncode}); names on the Hub no longer work")
            sys.stdout.flush()
            break
    server.kill()
    server.wait()
    afterwards()
    return 0


class _Watched:
    """A process that may end, be killed, or become another program; its number may be given to somebody else then."""

    def __init__(self, pid: int) -> None:
        self._pid, self._born = pid, _born(pid)
        try:
            self._handle: int | None = os.pidfd_open(pid)  # type: ignore[attr-defined,unused-ignore]
        except (AttributeError, OSError):  # no Linux, or one before 5.3
            self._handle = None

    def close(self) -> None:
        if self._handle is not None:
            os.close(self._handle)

    def lives(self) -> bool:
        """Waits a moment; whether it is still there then."""
        if self._handle is not None:
            return not select.select([self._handle], [], [], LOOK_EVERY_S)[0]
        time.sleep(LOOK_EVERY_S)
        try:
            os.kill(self._pid, 0)
        except ProcessLookupError:
            return False
        return _born(self._pid) == self._born


def _born(pid: int) -> str | None:
    """When a process started, in the kernel's ticks (proc(5), stat, field 22); None where there is no /proc."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return stat.rpartition(")")[2].split()[19]
