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
from contextlib import nullcontext
from pathlib import Path

from runner.errors import say
from runner.launch.network import GLOO, LOOPBACK
from runner.launch.outcome import RanksExit
from runner.launch.ranks import MEETING_FILE, RANK_FLAG, RankInfo, Start
from runner.launch.watch import HangDetector, recorded_signals, wait_for_end
from runner.processes import die_with_parent, threads_variable, usable_cores, why_ended

KILL_AFTER_S = 5.0
"""A rank that has not ended by then waits inside a collective, where it cannot save any more."""


def run_local(
    argv: Sequence[str],
    start: Start,
    logs: Path,
    watch: HangDetector,
    environ: Mapping[str, str],
) -> RanksExit:
    """Runs `argv` as the ranks of this machine and waits for them.

    Rank 0 writes to our stdout and stderr, the others to `logs/rank-N.log`. If a rank fails, or if
    ranks hang, the others are ended: by SIGTERM, five seconds later by SIGKILL. SIGTERM, SIGINT and
    SIGHUP reach the ranks as SIGTERM, SIGUSR1 as itself; a second SIGINT ends them at once. The
    ranks die with this process.

    Args:
        argv: the command of a rank.
        watch: finds ranks that hang.
    """
    if ignored := start.find_rank_0(environ).ignored:
        say(ignored)
    logs.mkdir(parents=True, exist_ok=True)
    meeting = Path(tempfile.mkdtemp(prefix="airlift-"))
    common, port = _common_environment(environ, start.world_size, meeting), _free_port()
    ranks: list[subprocess.Popen[bytes]] = []
    with recorded_signals() as received:
        try:
            for rank in range(start.world_size):
                info = RankInfo(
                    rank=rank,
                    world_size=start.world_size,
                    local_rank=rank,
                    local_world_size=start.world_size,
                    master="127.0.0.1",
                    port=port,
                )
                log = logs / f"rank-{rank}.log" if rank else None
                ranks.append(_start(argv, {**common, **info.variables()}, log))
            waited = wait_for_end(ranks, received, watch, _passed_on)
        finally:
            _end(ranks)
            shutil.rmtree(meeting, ignore_errors=True)
    if waited.failed is None:
        return RanksExit(in_job=False, hung=waited.hung, signals=waited.signals)
    code = ranks[waited.failed].returncode or -signal.SIGTERM  # ended by a second Ctrl-C
    words = _words(waited.failed, code, logs)
    return RanksExit(
        in_job=False, code=code, rank=waited.failed, words=words, signals=waited.signals
    )


def _passed_on(number: int) -> int:
    return signal.SIGUSR1 if number == signal.SIGUSR1 else signal.SIGTERM


def _words(rank: int, code: int, logs: Path) -> str:
    """How a rank ended, for people."""
    log = f"; its log: {logs / f'rank-{rank}.log'}" if rank else ""
    if code >= 0:
        return f"rank {rank} failed with exit code {code}; the others were ended{log}"
    hint = f" ({why})" if (why := why_ended(code)) else ""
    name = signal.Signals(-code).name
    return f"rank {rank} was ended by {name}{hint}; the others were ended{log}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _common_environment(
    environ: Mapping[str, str], processes: int, meeting: Path
) -> dict[str, str]:
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
    }


def _start(
    argv: Sequence[str], environ: Mapping[str, str], log: Path | None
) -> subprocess.Popen[bytes]:
    """Starts a rank.

    In a new session: Ctrl-C reaches the ranks once, from us, and the processes that they start can
    be ended with them.

    Args:
        log: gets all it writes; None: our own stdout and stderr do.
    """
    with log.open("ab") if log else nullcontext() as output:
        return subprocess.Popen(
            list(argv),
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT if output else None,
            start_new_session=True,
            preexec_fn=die_with_parent(),
        )


def _end(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    running = [process for process in ranks if process.poll() is None]
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in running:
            if process.poll() is None:
                os.killpg(process.pid, number)
        deadline = time.monotonic() + KILL_AFTER_S
        while time.monotonic() < deadline and any(process.poll() is None for process in running):
            time.sleep(0.05)  # most ranks end within one look
