"""Processes: when one was started, whether it is alive, how it ends with its parent, its limits.

And streams that outlive their reader: `runner train ... | head` must not end the training. Once the
reader of a pipe is gone, what is written there is discarded: the logs have it as well. Every other
error, such as a full disk, stays an error.
"""

from __future__ import annotations

import ctypes
import io
import os
import re
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

MOST_FILES = 2**20
"""The limit of open files is not raised above this: some programs close every possible number."""


def birth_time(pid: int) -> str | None:
    """When a process started, in clock ticks since boot (proc(5), stat, field 22).

    Returns:
        `gone` for a process that has ended and that its parent has not yet reaped. None if /proc
        does not show the process.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return "gone" if fields[0] in "ZX" else fields[19]


def is_alive(pid: int, born: str | None = None) -> bool:
    """Whether a process of this machine runs, under any user. One that has ended does not, even if
    its parent has not reaped it.

    Args:
        born: its `birth_time`. None: any process with this number counts, so a reused number too.
    """
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    now = birth_time(pid)
    return now != "gone" if born is None else now in (born, None)


def die_with_parent(ended_by: int = signal.SIGKILL) -> Callable[[], None] | None:
    """Returns a `preexec_fn` that makes the child end with this process (Linux, `prctl(2)`).

    Args:
        ended_by: the signal that the child gets when this process ends.

    Returns:
        None where the system is not Linux.
    """
    if sys.platform != "linux":
        return None
    libc, parent = ctypes.CDLL(None), os.getpid()
    return lambda: _tie(libc, parent, ended_by)


def die_with(parent: int) -> None:
    """Makes this process end with its parent, if other code started it (multiprocessing)."""
    if sys.platform == "linux":
        _tie(ctypes.CDLL(None), parent, signal.SIGKILL)


def _tie(libc: ctypes.CDLL, parent: int, ended_by: int) -> None:
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG
    libc.prctl(set_parent_death_signal, int(ended_by), 0, 0, 0)
    if os.getppid() != parent:  # it ended before the kernel knew of the tie
        os._exit(1)


def raise_limits() -> None:
    """Raises this process's limits of open files and locked memory, and turns core files off.

    Soft limits only, up to the hard ones; children inherit them. Many systems have a soft limit of
    1024 open files, which ends a run of some 300 ranks. RDMA locks memory. A crash of many ranks
    would fill the disk with core files as large as their memory.
    """
    for kind, most in (
        (resource.RLIMIT_NOFILE, MOST_FILES),
        (resource.RLIMIT_MEMLOCK, resource.RLIM_INFINITY),
    ):
        soft, hard = resource.getrlimit(kind)
        wanted = _smaller(hard, most)
        if wanted != _smaller(wanted, soft):
            with suppress(ValueError, OSError):  # macOS has a lower limit of its own
                resource.setrlimit(kind, (wanted, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def _smaller(one: int, other: int) -> int:
    """The smaller of two limits; RLIM_INFINITY, which may be -1, is the largest."""
    finite = [limit for limit in (one, other) if limit != resource.RLIM_INFINITY]
    return min(finite, default=resource.RLIM_INFINITY)


def threads_variable(environ: Mapping[str, str], threads: int) -> tuple[dict[str, str], str]:
    """OMP_NUM_THREADS for a rank, unless the user's is a number; and a line where it is none.

    `export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK` leaves it empty where Slurm sets no such variable.
    OpenMP also takes a list, one number for each level: `4,1`.

    Args:
        threads: of this rank.
    """
    given = environ.get("OMP_NUM_THREADS")
    if given is not None and (match := re.fullmatch(r" *([1-9][0-9]*) *(,.*)?", given)):
        return {"OMP_NUM_THREADS": match[1]}, ""
    line = f"OMP_NUM_THREADS={threads}: {given!r}, as it was set, is no number of threads"
    return {"OMP_NUM_THREADS": str(threads)}, "" if given is None else line


_WHY_ENDED: dict[int, str] = {
    signal.SIGKILL: "out of memory? see `dmesg`",
    signal.SIGXCPU: "this shell's limit of CPU time, `ulimit -t`: use a compute node, by salloc",
    signal.SIGXFSZ: "this shell's limit of a file's size, `ulimit -f`",
    signal.SIGILL: "a package was compiled for a newer CPU than this machine's (lscpu)",
    signal.SIGBUS: "a full disk or /dev/shm, or a file that became shorter: df -h /dev/shm .",
}
"""Signals that a limit or the machine sends -> the usual reason."""


def why_ended(returncode: int) -> str:
    """The usual reason for the signal that ended a process; empty: none is known."""
    cpu_time, _ = resource.getrlimit(resource.RLIMIT_CPU)
    if returncode == -signal.SIGKILL and cpu_time != resource.RLIM_INFINITY:
        return (
            f"this shell gives a process {cpu_time} s of CPU time, `ulimit -t`: use a compute "
            "node, by salloc; else it was too little memory"
        )
    return _WHY_ENDED.get(-returncode, "")


def usable_cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Pipe(io.FileIO):
    """A descriptor that leads to /dev/null as soon as nobody reads it.

    Args:
        closed: is called once, when that happens.
    """

    def __init__(
        self, descriptor: int, closed: Callable[[], None] | None = None, *, closefd: bool = False
    ) -> None:
        super().__init__(descriptor, "w", closefd=closefd)
        self._closed = closed

    def write(self, data: Any, /) -> int:  # bytes, or any other buffer
        try:
            return super().write(data)
        except BrokenPipeError:
            size = memoryview(data).nbytes
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())  # children that inherit it are safe, too
            os.close(nowhere)
            if self._closed is not None:
                self._closed()
            return size


def outliving(descriptor: int, closed: Callable[[], None]) -> TextIO:
    """A text stream on a descriptor, which it closes at its end.

    Args:
        closed: is called once, when the reader is gone.
    """
    pipe = _Pipe(descriptor, closed, closefd=True)
    return io.TextIOWrapper(io.BufferedWriter(pipe), line_buffering=True)


def outlive_readers() -> None:
    """Makes stdout and stderr of this process outlive their readers."""
    sys.stdout, sys.stderr = _made_safe(sys.stdout, 1), _made_safe(sys.stderr, 2)


def _made_safe(stream: TextIO, descriptor: int) -> TextIO:
    if not isinstance(stream, io.TextIOWrapper):  # a test's, or none at all
        return stream
    raw = getattr(stream.buffer, "raw", stream.buffer)
    if type(raw) is not io.FileIO or raw.fileno() != descriptor:
        return stream
    stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_Pipe(descriptor)),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
