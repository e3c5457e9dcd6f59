"""The files with which a rank reports to its launcher: a heartbeat, its stacks, its failure.

Each rank writes three small files in `logs/` (`Heartbeat`); `runner.launch.watch` reads
them. `rank-N.pulse` changes whenever the rank makes progress. `rank-N.stacks` gets the stacks of
all threads after SIGUSR2. `rank-N.failure` holds the reason why the rank failed. Nothing here
imports torch, so a rank can report a failed import of torch too.

In a training step the loop beats. In the slow phases around it (imports, loading, a checkpoint) a
thread beats as long as the main thread computes or reads: a slow start shows that it is alive, and
a start that hangs shows nothing.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from runner.from_stage import write_atomically
from runner.run_folder.layout import read_json

PULSE_EVERY_S = 1.0
"""Least time between two writes of a heartbeat, in seconds: sixty ranks share one disk."""

ASK_FOR_STACKS = signal.SIGUSR2
"""srun forwards it to the ranks too. SIGUSR1 and SIGTERM mean: save and exit."""

JOIN = "join"
"""The phase of rank 0 that the others look for: it listens."""

START, LOAD, SAVE, EXPORT = "start", "load", "save", "export"
SLOW_PHASES = (START, JOIN, LOAD, SAVE, EXPORT)
"""Phases that may be long without a heartbeat: slow imports, a large checkpoint."""

WORKING_S = 0.001
"""A main thread that used this much CPU time since the last heartbeat is not blocked.

Reading a file costs a little of it too; waiting for a lock or a dead disk costs none.
"""


def pulse_path(logs: Path, rank: int) -> Path:
    """The file of a rank's heartbeat."""
    return logs / f"rank-{rank}.pulse"


def stacks_path(logs: Path, rank: int) -> Path:
    """The file of a rank's stacks."""
    return logs / f"rank-{rank}.stacks"


def flight_prefix(logs: Path) -> Path:
    """The files of torch's flight recorder, without the rank's number at their end."""
    return logs / "flight-rank-"


def failure_path(logs: Path, rank: int) -> Path:
    """The file with the reason why a rank failed."""
    return logs / f"rank-{rank}.failure"


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a rank failed.

    Attributes:
        time: seconds since 1970, by the clock of its node.
        consequence: it only lost the connection to another rank.
        code: its exit code.
        text: the error and its remedy, or a traceback.
        no_memory: it ran out of memory.
    """

    rank: int
    host: str
    time: float
    consequence: bool
    code: int
    text: str
    no_memory: bool = False

    def message_and_remedy(self) -> tuple[str, str]:
        """The message and remedy of our own error; else the last line of a traceback alone."""
        text, _, remedy = self.text.removeprefix("error: ").strip().partition("\n  -> ")
        return (text if self.text.startswith("error: ") else text.splitlines()[-1]), remedy


class Heartbeat:
    """Writes the files of this rank. Created before torch is imported.

    Attributes:
        logs: their folder.
        started: the time of their creation, in seconds since 1970.
        tries: whether the steps are a trial of an automatic `batch.micro`.
    """

    tries = False

    def __init__(self, logs: Path, rank: int) -> None:
        logs.mkdir(parents=True, exist_ok=True)
        self.logs, self.started, self._rank = logs, time.time(), rank
        self._count, self._phase, self._written = 0, "", 0.0
        self._shown = ("", False)
        self._main_thread = threading.main_thread().ident or 0
        self._worked, self._beats = 0.0, False
        self._when_asked: Callable[[], None] | None = None
        self._file = os.open(pulse_path(logs, rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self._stacks: IO[bytes] = stacks_path(logs, rank).open("wb", buffering=0)  # stays open
        failure_path(logs, rank).unlink(missing_ok=True)  # of an earlier run
        faulthandler.register(ASK_FOR_STACKS, file=self._stacks, all_threads=True)
        self.beat(START)
        threading.Thread(target=self._watch, name="heartbeat", daemon=True).start()

    def beat(self, phase: str) -> None:
        """Records progress and the phase; writes the file at most once per `PULSE_EVERY_S`."""
        self._count += 1
        now = time.monotonic()
        shown = (phase, self.tries)
        if shown == self._shown and now - self._written < PULSE_EVERY_S:
            return
        self._phase, self._written, self._shown = phase, now, shown
        self._worked = self._cpu_time()
        pulse = {"count": self._count, "phase": phase, "tries": self.tries, "pid": os.getpid()}
        line = json.dumps({**pulse, "host": socket.gethostname()})
        os.pwrite(self._file, f"{line:<200}\n".encode(), 0)

    def when_asked_for_stacks(self, work: Callable[[], None]) -> None:
        """Sets what to do, once and in a thread, after the launcher has asked for the stacks."""
        self._when_asked = work

    def _watch(self) -> None:
        while True:
            time.sleep(PULSE_EVERY_S)
            try:
                is_working = self._cpu_time() - self._worked > WORKING_S
                if self._beats or (self._phase in SLOW_PHASES and is_working):
                    self.beat(self._phase)
                if self._when_asked is not None and os.fstat(self._stacks.fileno()).st_size:
                    work, self._when_asked = self._when_asked, None
                    work()
            except OSError:  # a full disk: the rank itself will meet it and report it
                continue

    def _cpu_time(self) -> float:
        """Seconds of CPU time of the main thread; 0 where the system does not count them."""
        if not hasattr(time, "pthread_getcpuclockid"):  # macOS
            return 0.0
        return time.clock_gettime(time.pthread_getcpuclockid(self._main_thread))

    @contextmanager
    def beating(self, phase: str) -> Iterator[None]:
        """Beats as long as the block runs: for long work that others wait for."""
        self.beat(phase)
        self._beats = True
        try:
            yield
        finally:
            self._beats = False

    def fail(self, text: str, code: int, *, consequence: bool, no_memory: bool = False) -> None:
        """Records why this rank fails.

        Args:
            text: the error and its remedy, or a traceback.
            code: its exit code.
            consequence: it only lost the connection to another rank.
            no_memory: it ran out of memory.
        """
        failure = Failure(
            rank=self._rank,
            host=socket.gethostname(),
            time=time.time(),
            consequence=consequence,
            code=code,
            text=text,
            no_memory=no_memory,
        )
        write_atomically(failure_path(self.logs, self._rank), json.dumps(asdict(failure)).encode())


def read_pulse(logs: Path, rank: int) -> Mapping[str, object] | None:
    """The last heartbeat of a rank; None before the first, or while it cannot be read."""
    pulse = read_json(pulse_path(logs, rank))
    return pulse if isinstance(pulse, dict) else None


def tries(logs: Path) -> bool:
    """Whether the last heartbeat of any rank was in a trial of `batch.micro`."""
    ranks = (int(path.stem.removeprefix("rank-")) for path in logs.glob("rank-*.pulse"))
    return any((read_pulse(logs, rank) or {}).get("tries") for rank in ranks)


def read_failure(logs: Path, rank: int) -> Failure | None:
    """Why a rank failed; None if it recorded nothing."""
    try:
        return Failure(**json.loads(failure_path(logs, rank).read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


def read_failures(logs: Path) -> list[Failure]:
    """What ranks recorded: the cause first, then those that only lost another rank."""
    numbers = (path.stem.removeprefix("rank-") for path in logs.glob("rank-*.failure"))
    found = [read_failure(logs, int(number)) for number in numbers]
    return sorted(filter(None, found), key=lambda failure: (failure.consequence, failure.time))


def clear(logs: Path) -> None:
    """Removes the files of an earlier run."""
    for suffix in ("pulse", "stacks", "failure"):
        for path in logs.glob(f"rank-*.{suffix}"):
            path.unlink(missing_ok=True)
    for path in logs.glob(f"{flight_prefix(logs).name}*"):
        path.unlink(missing_ok=True)
