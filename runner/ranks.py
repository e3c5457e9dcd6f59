"""Ranks on one machine: started, heard, ended together.

The same command goes in once per rank; out comes one exit code of the contract (0 done, 5 stopped: run it again).
`runner.batch` does the same with srun and shares the handling of signals.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from runner.records import RunFolder
from runner.resume import newest_first
from runner.vitals import ASK_FOR_STACKS
from runner.watch import Watch

RANK_FLAG = "AIRLIFT_RANK"
"""Set to 1 in every rank that Airlift starts."""

MEETING_FILE = "AIRLIFT_MEETING_FILE"
"""Where ranks on one machine find each other (torch's FileStore): its TCP store asks DNS who 127.0.0.1 is."""

SENTINEL = "requeue"
"""Rank 0 leaves this file in the run folder, after a barrier, when all ranks saved and left because of a signal."""

TORCH_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""All five must be set, or DeepSpeed goes looking for MPI."""

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
KILL_AFTER_S = 5.0
TAIL_LINES = 20


def run_local(
    argv: Sequence[str],
    processes: int,
    run_folder: Path,
    environ: Mapping[str, str] | None = None,
    hang_after_s: float | None = None,
) -> int:
    """Runs `argv` as `processes` ranks on this machine and waits for them.

    Rank 0 writes to our stdout and stderr, the others to `<run folder>/logs/rank-N.log`. When one fails, what it left
    as the reason (else the end of its log) is shown and the others are ended: SIGTERM, five seconds later SIGKILL. A
    rank without a sign of life is a hang: told with each rank's stack, and ended likewise. SIGTERM, SIGINT and SIGHUP
    arrive at the ranks as SIGTERM, SIGUSR1 as itself; a second SIGINT ends them at once. Ranks die with us.

    Returns:
        0 done; the first failing rank's code if it is one of the contract (1 otherwise); 5 when stopped by a
        signal or hanging, with or without a checkpoint: the same command goes on from the newest one.
    """
    environ = dict(os.environ if environ is None else environ)
    meeting = Path(tempfile.mkdtemp(prefix="airlift-"))
    common = _common_environment(environ, processes, meeting)
    sentinel = run_folder / SENTINEL
    sentinel.unlink(missing_ok=True)
    watch = Watch(run_folder / "logs", processes, hang_after_s)
    ranks: list[_LocalRank] = []
    with recorded_signals() as received:
        try:
            for rank in range(processes):
                ranks.append(_LocalRank.start(argv, rank, processes, common, run_folder / "logs"))
            failed, stopped, hang = _watch(ranks, received, watch)
        finally:
            _end(ranks)
            shutil.rmtree(meeting, ignore_errors=True)
    if hang:
        say("the ranks were ended; run the same command again to resume from the last checkpoint")
        return 5
    if failed is not None:
        return _report(failed, stopped, watch, RunFolder(run_folder))
    if sentinel.exists():
        sentinel.unlink()
        say("stopped by a signal; run the same command again to resume")
        return 5
    return 0


@dataclass
class _LocalRank:
    rank: int
    process: subprocess.Popen[bytes]
    log: Path | None
    log_start: int

    @classmethod
    def start(cls, argv: Sequence[str], rank: int, processes: int, common: Mapping[str, str], logs: Path) -> _LocalRank:
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        environ = {**common, **place, "WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
        log, output = None, None
        if rank > 0:
            logs.mkdir(parents=True, exist_ok=True)
            log = logs / f"rank-{rank}.log"
            output = log.open("ab")
        start = output.tell() if output else 0
        try:
            process = _popen(argv, environ, output)
        finally:
            if output:
                output.close()
        return cls(rank, process, log, start)

    def tail(self) -> list[str]:
        if self.log is None:
            return []
        with self.log.open("rb") as file:
            file.seek(self.log_start)
            return [line.decode("utf-8", "replace").rstrip("\n") for line in deque(file, TAIL_LINES)]


def _common_environment(environ: dict[str, str], processes: int, meeting: Path) -> dict[str, str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    threads = max(1, _usable_cores() // processes)
    return {
        # Without these two, torch takes every core in every rank, and a killed rank's last lines are lost.
        "OMP_NUM_THREADS": str(threads),
        "PYTHONUNBUFFERED": "1",
        # gloo would look this machine's own name up, in DNS where /etc/hosts does not know it.
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        **environ,
        RANK_FLAG: "1",
        MEETING_FILE: str(meeting / "ranks"),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _popen(argv: Sequence[str], environ: Mapping[str, str], output: IO[bytes] | None) -> subprocess.Popen[bytes]:
    # A session of its own: a Ctrl-C on the terminal reaches the ranks once, from us, and their helpers can be ended
    # with them.
    return subprocess.Popen(
        list(argv),
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT if output else None,
        start_new_session=True,
        preexec_fn=die_with_parent(),
    )


def die_with_parent(ended_by: int = signal.SIGKILL) -> Callable[[], None] | None:
    """A function for the child, between fork and exec, that ties its life to ours (Linux `prctl(2)`).

    Args:
        ended_by: the signal it gets when we are gone.
    """
    if sys.platform != "linux":
        return None
    libc, parent = ctypes.CDLL(None), os.getpid()
    return lambda: _tie(libc, parent, ended_by)


def die_with(parent: int) -> None:
    """Ties this process's life to that of its parent: for what is started by others, as by multiprocessing."""
    if sys.platform == "linux":
        _tie(ctypes.CDLL(None), parent, signal.SIGKILL)


def _tie(libc: ctypes.CDLL, parent: int, ended_by: int) -> None:
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG
    libc.prctl(set_parent_death_signal, int(ended_by), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


@contextmanager
def recorded_signals() -> Iterator[deque[int]]:
    """Stop signals are only noted while this lasts; the waiting loop hands them on, so none meets a half-made list."""
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


def _watch(ranks: Sequence[_LocalRank], received: deque[int], watch: Watch) -> tuple[_LocalRank | None, bool, bool]:
    """Waits for the ranks. Returns the first that failed, if any, whether a stop was asked for, whether they hang."""
    stopped = False
    interrupts = 0
    while True:
        while received:
            number = received.popleft()
            interrupts += number == signal.SIGINT
            if interrupts > 1:
                return next((r for r in ranks if r.process.poll() is None), None), True, False
            if not stopped:
                say(f"{signal.Signals(number).name} received: the ranks save a checkpoint and stop")
            stopped = True
            for rank in ranks:
                rank.process.send_signal(signal.SIGUSR1 if number == signal.SIGUSR1 else signal.SIGTERM)
        codes = [rank.process.poll() for rank in ranks]
        failed = [rank for rank, code in zip(ranks, codes, strict=True) if code]
        if failed:
            # Killed from outside comes first: the others then fail because they lost it.
            return min(failed, key=lambda rank: rank.process.returncode > 0), stopped, False
        if all(code == 0 for code in codes):
            return None, stopped, False
        if silent := watch.silent():
            for rank in ranks:
                rank.process.send_signal(ASK_FOR_STACKS)
            tell_of_hang(watch, silent)
            return None, stopped, True
        time.sleep(0.05)


def tell_of_hang(watch: Watch, silent: dict[int, float]) -> None:
    """Waits for the stacks that the ranks were asked for, and shows where each stands."""
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


def _report(failed: _LocalRank, stopped: bool, watch: Watch, folder: RunFolder) -> int:
    code = failed.process.returncode
    if stopped and code <= 0:
        whole = next(iter(newest_first(folder.checkpoints)), None)
        if whole is None:
            say("stopped by a signal before a checkpoint was saved; the same command begins anew")
        else:
            say(f"stopped by a signal; {whole.name} is saved: run the same command again to resume from there")
        return 5
    told = watch.report_failure()
    for line in told or failed.tail():
        print(line if told else f"[rank {failed.rank}] {line}", file=sys.stderr)
    log = f"; its log: {failed.log}" if failed.log else ""
    if code < 0:
        name = signal.Signals(-code).name
        hint = " (out of memory? see `dmesg`)" if -code == signal.SIGKILL else ""
        say(f"rank {failed.rank} was ended by {name}{hint}; the others were ended{log}")
        from_outside = -code in (signal.SIGKILL, *STOP_SIGNALS)
        return 5 if from_outside else 1
    say(f"rank {failed.rank} failed with exit code {code}; the others were ended{log}")
    return code if code <= 5 else 1


def say(text: str) -> None:
    print(f"runner: {text}", file=sys.stderr, flush=True)
