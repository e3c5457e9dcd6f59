"""What each rank leaves beside its log for whoever watches it: a pulse, the stacks it stands in, why it failed.

Three small files a rank in `logs/`, written by the rank (`Vitals`) and read by the launcher (`runner.watch`):
`rank-N.pulse` changes whenever the rank gets on, `rank-N.stacks` is filled when SIGUSR2 asks for it, `rank-N.failure`
says once why it gave up. Nothing here imports torch: a rank can tell why it could not even do that.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

PULSE_EVERY_S = 1.0
"""Least time between two writes of a pulse: sixty ranks share one disk."""

ASK_FOR_STACKS = signal.SIGUSR2
"""Reaches the ranks through srun too; SIGUSR1 and SIGTERM mean to save and leave."""

SLOW_PHASES = ("start", "save", "export")
"""What may take long without a sign of life: imports from a network disk, a large checkpoint."""


def pulse_path(logs: Path, rank: int) -> Path:
    """Where a rank's pulse is."""
    return logs / f"rank-{rank}.pulse"


def stacks_path(logs: Path, rank: int) -> Path:
    """Where a rank's stacks are written when asked for."""
    return logs / f"rank-{rank}.stacks"


def failure_path(logs: Path, rank: int) -> Path:
    """Where a rank says why it failed."""
    return logs / f"rank-{rank}.failure"


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a rank gave up.

    Attributes:
        time: seconds since 1970, by the clock of its node.
        consequence: it only lost another rank.
        code: the exit code it ends with.
        text: the error and its remedy, or a traceback.
    """

    rank: int
    host: str
    time: float
    consequence: bool
    code: int
    text: str


class Vitals:
    """This rank's files. Made before anything else is imported."""

    def __init__(self, logs: Path, rank: int) -> None:
        logs.mkdir(parents=True, exist_ok=True)
        self._logs, self._rank = logs, rank
        self._count, self._phase, self._written = 0, "", 0.0
        self._file = os.open(pulse_path(logs, rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self._stacks: IO[bytes] = open(stacks_path(logs, rank), "wb", buffering=0)  # noqa: SIM115 - as long as we live
        faulthandler.register(ASK_FOR_STACKS, file=self._stacks, all_threads=True)
        self.beat("start")

    def beat(self, phase: str) -> None:
        """Says that this rank gets on, and what it is at; at most once a second is it written down."""
        self._count += 1
        now = time.monotonic()
        if phase == self._phase and now - self._written < PULSE_EVERY_S:
            return
        self._phase, self._written = phase, now
        line = json.dumps({"count": self._count, "phase": phase, "pid": os.getpid(), "host": socket.gethostname()})
        os.pwrite(self._file, f"{line:<200}\n".encode(), 0)

    def fail(self, text: str, code: int, *, consequence: bool) -> None:
        """Writes down why this rank gives up."""
        failure = Failure(
            rank=self._rank,
            host=socket.gethostname(),
            time=time.time(),
            consequence=consequence,
            code=code,
            text=text,
        )
        path = failure_path(self._logs, self._rank)
        part = path.with_suffix(".failure.part")
        part.write_text(json.dumps(asdict(failure)), encoding="utf-8")
        part.replace(path)


def read_pulse(logs: Path, rank: int) -> Mapping[str, object] | None:
    """The last pulse; None before the first, or where it is not to be read just now."""
    try:
        pulse = json.loads(pulse_path(logs, rank).read_bytes())
    except (OSError, ValueError):
        return None
    return pulse if isinstance(pulse, dict) else None


def read_failure(logs: Path, rank: int) -> Failure | None:
    """Why a rank gave up; None if it did not say."""
    try:
        return Failure(**json.loads(failure_path(logs, rank).read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


def clear(logs: Path) -> None:
    """Forgets the ranks of an earlier run in this folder."""
    for suffix in ("pulse", "stacks", "failure"):
        for path in logs.glob(f"rank-*.{suffix}"):
            path.unlink(missing_ok=True)
