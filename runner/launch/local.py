"""Ranks on one machine: started, watched and ended together."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from runner.errors import say
from runner.launch.network import GLOO, LOOPBACK
from runner.launch.outcome import Ended
from runner.launch.place import MEETING_FILE, RANK_FLAG, Start
from runner.launch.watch import HangDetector, recorded_signals, wait_for_end
from runner.processes import die_with_parent, threads_variable, usable_cores, why_ended

KILL_AFTER_S = 5.0


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
            seen = wait_for_end([rank.process for rank in ranks], received, watch, _passed_on)
        finally:
            _end(ranks)
            shutil.rmtree(meeting, ignore_errors=True)
    sent = frozenset(seen.signals)
    if seen.failed is None:
        return Ended(in_job=False, hung=seen.hung, signals=sent)
    failed = ranks[seen.failed]
    return Ended(
        in_job=False,
        code=failed.process.returncode or -signal.SIGTERM,  # ended by a second Ctrl-C
        rank=failed.rank,
        words=failed.words(),
        signals=sent,
    )


def _passed_on(number: int) -> int:
    return signal.SIGUSR1 if number == signal.SIGUSR1 else signal.SIGTERM


@dataclass
class _LocalRank:
    rank: int
    process: subprocess.Popen[bytes]
    log: Path | None

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
        try:
            process = _popen(argv, environ, output)
        finally:
            if output:
                output.close()
        return cls(rank, process, log)

    def words(self) -> str:
        """How it ended, for people."""
        code = self.process.returncode
        log = f"; its log: {self.log}" if self.log else ""
        if code >= 0:
            return f"rank {self.rank} failed with exit code {code}; the others were ended{log}"
        hint = f" ({why})" if (why := why_ended(code)) else ""
        name = signal.Signals(-code).name
        return f"rank {self.rank} was ended by {name}{hint}; the others were ended{log}"


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
        stderr=subprocess.STDOUT if output else None,
        start_new_session=True,
        preexec_fn=die_with_parent(),
    )


def _end(ranks: Sequence[_LocalRank]) -> None:
    running = [rank.process for rank in ranks if rank.process.poll() is None]
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in running:
            if process.poll() is None:
                os.killpg(process.pid, number)
        deadline = time.monotonic() + KILL_AFTER_S
        while time.monotonic() < deadline and any(process.poll() is None for process in running):
            time.sleep(0.05)
