"""Ranks on one machine: started, watched and ended together."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from runner.errors import say
from runner.launch.hang_detector import HangDetector
from runner.launch.network import GLOO, LOOPBACK
from runner.launch.outcome import STOP_SIGNALS, Ended
from runner.launch.place import MEETING_FILE, RANK_FLAG, Start
from runner.processes import die_with_parent, threads_variable, usable_cores, why_ended
from runner.run_folder.heartbeat import ASK_FOR_STACKS

STOPPING = "the ranks stop, and save a checkpoint if they have made a step"
KILL_AFTER_S = 5.0
TAIL_LINES = 20
TAIL_BYTES = 2**16
"""How much of a rank's stderr is kept to find out why it ended."""


def run_local(
    argv: Sequence[str],
    start: Start,
    logs: Path,
    watch: HangDetector,
    environ: Mapping[str, str],
) -> Ended:
    """Runs `argv` as the ranks of this machine and waits for them.

    Rank 0 writes to our stdout and stderr, the others to `logs/rank-N.log`. If a rank fails, or if
    ranks hang, the others are ended: by SIGTERM, five seconds later by SIGKILL. SIGTERM, SIGINT and
    SIGHUP reach the ranks as SIGTERM, SIGUSR1 as itself; a second SIGINT ends them at once. The
    ranks die with this process.

    Args:
        argv: the command of a rank.
        watch: finds ranks that hang.
    """
    processes = start.world_size
    if ignored := start.find_rank_0(environ).ignored:
        say(ignored)
    meeting = Path(tempfile.mkdtemp(prefix="airlift-"))
    common = _common_environment(dict(environ), processes, meeting)
    ranks: list[_LocalRank] = []
    with recorded_signals() as received:
        try:
            for rank in range(processes):
                log = logs / f"rank-{rank}.log" if rank else None
                ranks.append(_LocalRank.start(argv, rank, processes, common, log))
            failed, signals, hung = _watch(ranks, received, watch)
        finally:
            _end(ranks)
            for started in ranks:
                if started.stderr is not None:
                    started.stderr.wait()
            shutil.rmtree(meeting, ignore_errors=True)
    sent = frozenset(signals)
    if failed is None:
        return Ended(in_job=False, hung=hung, signals=sent)
    return Ended(
        in_job=False,
        code=failed.process.returncode or -signal.SIGTERM,  # ended by a second Ctrl-C
        words=failed.words(),
        signals=sent,
        last_words=failed.last_words(),
        tail=[f"[rank {failed.rank}] {line}" for line in failed.tail()],
    )


@dataclass
class _LocalRank:
    rank: int
    process: subprocess.Popen[bytes]
    log: Path | None
    log_start: int
    stderr: CopiedStderr | None

    @classmethod
    def start(
        cls,
        argv: Sequence[str],
        rank: int,
        processes: int,
        common: Mapping[str, str],
        log: Path | None,
    ) -> _LocalRank:
        environ = {
            **common,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(processes),
            "LOCAL_WORLD_SIZE": str(processes),
        }
        output = None
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
            output = log.open("ab")
        start = output.tell() if output else 0
        try:
            process = _popen(argv, environ, output)
        finally:
            if output:
                output.close()
        stderr = CopiedStderr(process.stderr) if process.stderr else None
        return cls(rank, process, log, start, stderr)

    def words(self) -> str:
        """How it ended, for people."""
        code = self.process.returncode
        log = f"; its log: {self.log}" if self.log else ""
        if code >= 0:
            return f"rank {self.rank} failed with exit code {code}; the others were ended{log}"
        hint = f" ({why})" if (why := why_ended(code)) else ""
        name = signal.Signals(-code).name
        return f"rank {self.rank} was ended by {name}{hint}; the others were ended{log}"

    def tail(self) -> list[str]:
        if self.log is None:
            return []
        with self.log.open("rb") as file:
            file.seek(self.log_start)
            return [
                line.decode("utf-8", "replace").rstrip("\n") for line in deque(file, TAIL_LINES)
            ]

    def last_words(self) -> str:
        """The end of what this rank wrote to stderr, after it has ended."""
        if self.stderr is not None:
            return self.stderr.tail()
        if self.log is None:
            return ""
        with self.log.open("rb") as file:
            file.seek(max(self.log_start, self.log.stat().st_size - TAIL_BYTES))
            return file.read().decode("utf-8", "replace")


class CopiedStderr:
    """Copies a process's stderr to ours as it comes, in a thread, and keeps its end."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self._kept = b""
        self._pipe = pipe
        self._thread = threading.Thread(target=self._copy, daemon=True)
        self._thread.start()

    def _copy(self) -> None:
        while piece := os.read(self._pipe.fileno(), TAIL_BYTES):
            self._kept = (self._kept + piece)[-TAIL_BYTES:]
            with suppress(OSError):  # our terminal is gone: the rank must not end because of it
                sys.stderr.flush()
                _write_all(2, piece)

    def tail(self) -> str:
        """The end of it. Waits until the process has closed it, for a few seconds at most."""
        self.wait()
        return self._kept.decode("utf-8", "replace")

    def wait(self) -> None:
        """Waits until the process has closed it. Its children may keep it open."""
        self._thread.join(timeout=KILL_AFTER_S)


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _common_environment(environ: dict[str, str], processes: int, meeting: Path) -> dict[str, str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    threads, line = threads_variable(environ, max(1, usable_cores() // processes))
    if line:
        say(line)
    return {
        # Otherwise the last lines of a killed rank are lost.
        "PYTHONUNBUFFERED": "1",
        # Otherwise gloo looks up this machine's own name, in DNS if /etc/hosts lacks it.
        GLOO: LOOPBACK,
        **environ,
        # Otherwise torch uses every core in every rank.
        **threads,
        RANK_FLAG: "1",
        MEETING_FILE: str(meeting / "ranks"),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _popen(
    argv: Sequence[str], environ: Mapping[str, str], output: IO[bytes] | None
) -> subprocess.Popen[bytes]:
    # A new session: Ctrl-C reaches the ranks once, from us, and the processes that they start can
    # be ended with them.
    return subprocess.Popen(
        list(argv),
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT if output else subprocess.PIPE,
        start_new_session=True,
        preexec_fn=die_with_parent(),
    )


@contextmanager
def recorded_signals() -> Iterator[deque[int]]:
    """Records stop signals in a queue instead of acting on them.

    The waiting loop passes them on, so no signal meets a list of ranks that is half filled.
    """
    received: deque[int] = deque()

    def note(signum: int, _frame: object) -> None:
        received.append(signum)

    # A signal that was ignored when we started (nohup) stays ignored.
    handled = [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, note) for number in handled}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _watch(
    ranks: Sequence[_LocalRank], received: deque[int], watch: HangDetector
) -> tuple[_LocalRank | None, set[int], bool]:
    """Waits for the ranks.

    Returns:
        The first rank that failed, if any; the signals that were sent to stop the ranks; whether
        the ranks hang.
    """
    stopped: set[int] = set()
    interrupts = 0
    while True:
        while received:
            number = received.popleft()
            interrupts += number == signal.SIGINT
            if interrupts > 1:
                stopped |= {signal.SIGTERM, signal.SIGKILL}  # `_end` sends them
                return next((r for r in ranks if r.process.poll() is None), None), stopped, False
            if not stopped:
                say(f"{signal.Signals(number).name} received: {STOPPING}")
            passed_on = signal.SIGUSR1 if number == signal.SIGUSR1 else signal.SIGTERM
            stopped.add(passed_on)
            for rank in ranks:
                rank.process.send_signal(passed_on)
        codes = [rank.process.poll() for rank in ranks]
        failed = [rank for rank, code in zip(ranks, codes, strict=True) if code]
        if failed:
            return min(failed, key=lambda rank: _order(rank.process.returncode)), stopped, False
        if all(code == 0 for code in codes):
            return None, stopped, False
        if silent := watch.hung_ranks():
            for rank in ranks:
                rank.process.send_signal(ASK_FOR_STACKS)
            print_hang(watch, silent)
            return None, stopped, True
        time.sleep(0.05)


def _order(code: int) -> int:
    """Which of several ended ranks is the cause: one that was killed, else one that failed.

    NCCL's watchdog aborts the ranks that lost another one.
    """
    if code == -signal.SIGABRT:
        return 2
    return 1 if code > 0 else 0


def print_hang(watch: HangDetector, silent: dict[int, float]) -> None:
    """Waits for the requested stacks and prints the innermost frames of each rank."""
    watch.wait_for_stacks()
    for line in watch.report_hang(silent):
        say(line)


def _end(ranks: Sequence[_LocalRank]) -> None:
    running = [rank.process for rank in ranks if rank.process.poll() is None]
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in running:
            if process.poll() is None:
                os.killpg(process.pid, number)
        deadline = time.monotonic() + KILL_AFTER_S
        while time.monotonic() < deadline and any(process.poll() is None for process in running):
            time.sleep(0.05)
