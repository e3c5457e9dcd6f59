"""Runs one command and measures its seconds, CPU seconds and peak memory.

CPU time is the kernel's account of the process and all its descendants. Memory is the proportional
set size (PSS: each shared page divided among its users), added up over the process tree, sampled
every 20 ms, and less often where that would cost the process time.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

LOOK_EVERY_S = 0.02
# A look at gigabytes of pages takes 20 ms of a core and stops the process that it looks at. We wait
# this many times as long as a look took, so that all looks together cost at most 2 % of a core.
WAIT_PER_LOOK = 50
TIMEOUT_S = 900.0


class BenchError(Exception):
    """The benchmark cannot continue; the message gives the reason."""


@dataclass(frozen=True)
class Sample:
    """The cost of one run.

    Attributes:
        seconds: wall-clock.
        cpu_s: user and system, all processes.
        peak: memory in bytes.
    """

    seconds: float
    cpu_s: float
    peak: int

    def __add__(self, other: Sample) -> Sample:
        """One run after the other."""
        return Sample(
            self.seconds + other.seconds, self.cpu_s + other.cpu_s, max(self.peak, other.peak)
        )


def run(command: Sequence[str], environment: Mapping[str, str], cwd: Path) -> Sample:
    """Runs a command to its end.

    Raises:
        BenchError: it did not exit with 0; has the last lines it wrote.
    """
    log = cwd / "last-command.log"
    with open(log, "wb") as output:
        began = time.monotonic()
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        watch = _MemoryWatch(process.pid)
        alarm = threading.Timer(TIMEOUT_S, _end, (process.pid,))
        alarm.start()
        try:
            _, status, usage = os.wait4(process.pid, 0)
        except BaseException:
            process.kill()
            raise
        finally:
            alarm.cancel()
            watch.stop()
        seconds = time.monotonic() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    if seconds >= TIMEOUT_S:
        raise BenchError(f"`{shlex.join(command)}` took more than {TIMEOUT_S:.0f} seconds")
    if process.returncode != 0:
        said = "\n  ".join(log.read_text(errors="replace").strip().splitlines()[-8:])
        raise BenchError(f"`{shlex.join(command)}` ended with {process.returncode}:\n  {said}")
    return Sample(seconds, usage.ru_utime + usage.ru_stime, watch.peak)


class _MemoryWatch:
    """The most memory a process and its descendants had together, as often as we looked."""

    def __init__(self, pid: int) -> None:
        self.peak = 0
        self._pid, self._ended = pid, threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        pause = LOOK_EVERY_S
        while not self._ended.wait(pause):
            began = time.monotonic()
            self.peak = max(self.peak, sum(map(_pss, _tree(self._pid))))
            pause = max(LOOK_EVERY_S, WAIT_PER_LOOK * (time.monotonic() - began))

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()


def _end(pid: int) -> None:
    """Kills a process and its descendants, which else would go on beside the next candidate."""
    for one in _tree(pid):
        with suppress(ProcessLookupError):
            os.kill(one, signal.SIGKILL)


def _tree(pid: int) -> list[int]:
    """A process and its descendants, as they are now."""
    found, to_visit = [], [pid]
    while to_visit:
        one = to_visit.pop()
        found.append(one)
        for children in Path(f"/proc/{one}/task").glob("*/children"):
            try:
                to_visit += map(int, children.read_text().split())
            except (FileNotFoundError, ProcessLookupError):
                continue
    return found


def _pss(pid: int) -> int:
    """Bytes; 0 of a process that is gone or not ours."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
