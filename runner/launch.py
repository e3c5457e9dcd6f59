"""Argv and environment of the ranks: who this process is, and how the others are started.

`role` says whether this process is a rank, the launcher of a Slurm job, or the launcher on one machine.
A launcher calls `run_batch` or `run_local`: both start the same command once per rank, hand signals on, end all
ranks when one fails, and return an exit code of the contract (0 done, 5 stopped: run it again).
A rank calls `rank_environment` and exports `RankEnvironment.variables()` before torch or deepspeed is imported;
with all of them set, DeepSpeed never goes looking for MPI.

Nothing here imports torch, and nothing falls back to localhost: a rank that cannot learn where rank 0 is stops.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from runner.errors import UsageError
from runner.slurm import EPHEMERAL_PORTS, SlurmJobEnvironment, first_host, master_port

Role = Literal["rank", "batch", "local"]

RANK_FLAG = "AIRLIFT_RANK"
"""Set to 1 in every rank that Airlift starts."""

SENTINEL = "requeue"
"""Rank 0 leaves this file in the run folder, after a barrier, when all ranks saved and left because of a signal."""

TORCH_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
KILL_AFTER_S = 5.0
TAIL_LINES = 20


@dataclass(frozen=True, kw_only=True)
class RankEnvironment:
    """Which rank this is, of how many, and where rank 0 listens."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int

    def variables(self) -> dict[str, str]:
        """The environment variables that torch.distributed and DeepSpeed read."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }


def role(environ: Mapping[str, str], processes: int | None = None) -> Role:
    """What this process has to be: a rank, or the launcher of ranks with srun ("batch") or by itself ("local").

    A task of a step of several is a rank. A step of one task, or a `srun --pty` shell, is a machine to launch on;
    the rest of an allocation (batch script, salloc shell) launches with srun, unless `processes` is given.

    Raises:
        UsageError: `processes` where Slurm already started several tasks or several nodes are allocated, or an
            interactive shell that holds one of several nodes.
    """
    if environ.get(RANK_FLAG) == "1" or all(name in environ for name in TORCH_VARIABLES):
        return "rank"
    job = SlurmJobEnvironment.from_environ(environ)
    if job is None:
        return "local"
    step = job.step
    if step is None:
        if processes is None:
            return "batch"
        if job.num_nodes > 1:
            raise UsageError(
                f"--processes {processes} starts ranks on one machine, but this job has {job.num_nodes} nodes",
                "Leave --processes away: inside a job, srun starts the ranks on all nodes.",
            )
        return "local"
    if step.world_size == 1:
        return "local"
    if not job.interactive:
        if processes is not None:
            raise UsageError(
                f"--processes {processes} starts ranks, but srun has already started {step.world_size} tasks",
                "Leave --processes away, or run it without srun.",
            )
        return "rank"
    if len(step.tasks_per_node) > 1:
        raise UsageError(
            f"this shell is one of {step.world_size} tasks on {len(step.tasks_per_node)} nodes; "
            "from here only this node can be used",
            "Use `salloc` with the same options instead of `srun --pty`, then run it again.",
        )
    return "local"


def rank_environment(environ: Mapping[str, str]) -> RankEnvironment:
    """This rank's place, from Airlift's or torchrun's variables, else from Slurm's.

    Raises:
        UsageError: a variable is missing or contradicts another, or rank 0 cannot be located from this node.
    """
    if all(name in environ for name in TORCH_VARIABLES):
        return _checked(
            RankEnvironment(
                rank=_integer(environ, "RANK"),
                world_size=_integer(environ, "WORLD_SIZE"),
                local_rank=_integer(environ, "LOCAL_RANK"),
                local_world_size=_integer(environ, "LOCAL_WORLD_SIZE", environ["WORLD_SIZE"]),
                master_addr=environ["MASTER_ADDR"],
                master_port=_integer(environ, "MASTER_PORT"),
            )
        )
    job = SlurmJobEnvironment.from_environ(environ)
    if job is None or job.step is None:
        missing = ", ".join(name for name in TORCH_VARIABLES if name not in environ)
        raise UsageError(f"this process should be a rank, but {missing} are not set", "Start it with `runner train`.")
    step = job.step
    if len(set(step.tasks_per_node)) > 1:
        raise UsageError(
            f"Slurm placed the {step.world_size} ranks unevenly: {step.tasks_per_node} on the nodes {step.nodes}",
            "Give sbatch and srun --ntasks-per-node, not only --ntasks.",
        )
    if step.rank == 0 and step.node_rank != 0:
        raise UsageError(
            f"rank 0 is not on the first node of {step.nodes}, where the other ranks look for it",
            "Leave --distribution and SLURM_HOSTFILE away, or set MASTER_ADDR to the host of rank 0.",
        )
    num_nodes = len(step.tasks_per_node)
    port = environ.get("MASTER_PORT") or str(master_port(job.job_id, step.step_id))
    return _checked(
        RankEnvironment(
            rank=step.rank,
            world_size=step.world_size,
            local_rank=step.local_rank,
            local_world_size=step.tasks_per_node[step.node_rank],
            master_addr=master_address(environ, step.nodes, num_nodes),
            master_port=_integer({"MASTER_PORT": port}, "MASTER_PORT"),
        )
    )


def _checked(place: RankEnvironment) -> RankEnvironment:
    if not (0 <= place.rank < place.world_size and 0 <= place.local_rank < place.local_world_size <= place.world_size):
        raise UsageError(f"these rank variables contradict each other: {place.variables()}")
    return place


def _integer(environ: Mapping[str, str], name: str, default: str = "") -> int:
    text = environ.get(name, default)
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{name}={text!r} is not a number") from None


def master_address(environ: Mapping[str, str], nodes: str, num_nodes: int) -> str:
    """Where rank 0 listens, as every node can reach it.

    On one node that is the loopback address. On several it is MASTER_ADDR if the user set it (some sites want
    an InfiniBand name), else the first host if its name resolves, else the address Slurm itself uses for it.

    Raises:
        UsageError: MASTER_ADDR is a loopback address although there are several nodes, or nothing resolves.
    """
    given = environ.get("MASTER_ADDR")
    if num_nodes == 1:
        return given or "127.0.0.1"
    if given:
        if given == "localhost" or given.startswith("127.") or given == "::1":
            raise UsageError(
                f"MASTER_ADDR={given} would make each of the {num_nodes} nodes a world of its own",
                "Unset MASTER_ADDR (see ~/.bashrc and slurm.setup), or set it to the first node's address.",
            )
        return given
    host = first_host(nodes)
    address = host if _resolves(host) else _address_in_slurm(host)
    if address is None:
        raise UsageError(
            f"the first node {host!r} has no address: its name does not resolve on {socket.gethostname()} and "
            "Slurm knows no other for it",
            "Ask the site for a name that resolves on compute nodes and `export MASTER_ADDR=...` in slurm.setup.",
        )
    return address


def _resolves(host: str) -> bool:
    try:
        return bool(socket.getaddrinfo(host, None))
    except OSError:
        return False


def _address_in_slurm(host: str) -> str | None:
    try:
        shown = subprocess.run(
            ["scontrol", "show", "node", host, "--oneliner"], capture_output=True, text=True, timeout=60, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    address = next((word.partition("=")[2] for word in shown.split() if word.startswith("NodeAddr=")), "")
    return address if address and _resolves(address) else None


def runner_command(*arguments: str) -> list[str]:
    """This interpreter running `runner ARGUMENTS`; by its script, so that no folder named `runner` can shadow it."""
    script = Path(sys.executable).parent / "runner"
    return [sys.executable, str(script) if script.is_file() else "-mrunner", *arguments]


def run_local(argv: Sequence[str], processes: int, run_folder: Path, environ: Mapping[str, str] | None = None) -> int:
    """Runs `argv` as `processes` ranks on this machine and waits for them.

    Rank 0 writes to our stdout and stderr, the others to `<run folder>/logs/rank-N.log`. When one fails, the end
    of its log is shown and the others are ended: SIGTERM, five seconds later SIGKILL. SIGTERM, SIGINT and SIGHUP
    arrive at the ranks as SIGTERM, SIGUSR1 as itself; a second SIGINT ends them at once. Ranks die with us.

    Returns:
        0 done; the first failing rank's code if it is one of the contract (1 otherwise); 5 when stopped by a
        signal, with or without a checkpoint: the same command goes on from the newest one.
    """
    environ = dict(os.environ if environ is None else environ)
    common = _common_environment(environ, processes)
    sentinel = run_folder / SENTINEL
    sentinel.unlink(missing_ok=True)
    ranks: list[_LocalRank] = []
    with _recorded_signals() as received:
        try:
            for rank in range(processes):
                ranks.append(_LocalRank.start(argv, rank, processes, common, run_folder / "logs"))
            failed, stopped = _watch(ranks, received)
        finally:
            _end(ranks)
    if failed is not None:
        return _report(failed, stopped)
    if sentinel.exists():
        sentinel.unlink()
        _say("stopped by a signal; run the same command again to resume")
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


def _common_environment(environ: dict[str, str], processes: int) -> dict[str, str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    threads = max(1, _usable_cores() // processes)
    return {
        # Without these two, torch takes every core in every rank, and a killed rank's last lines are lost.
        "OMP_NUM_THREADS": str(threads),
        "PYTHONUNBUFFERED": "1",
        **environ,
        RANK_FLAG: "1",
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
        preexec_fn=_die_with_parent(),
    )


def _die_with_parent() -> Callable[[], None] | None:
    """A function for the child, between fork and exec, that ties its life to ours (Linux `prctl(2)`)."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)
    parent = os.getpid()
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG

    def tie() -> None:
        libc.prctl(set_parent_death_signal, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return tie


@contextmanager
def _recorded_signals() -> Iterator[deque[int]]:
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


def _watch(ranks: Sequence[_LocalRank], received: deque[int]) -> tuple[_LocalRank | None, bool]:
    """Waits for the ranks. Returns the first that failed, if any, and whether a stop was asked for."""
    stopped = False
    interrupts = 0
    while True:
        while received:
            number = received.popleft()
            interrupts += number == signal.SIGINT
            if interrupts > 1:
                return next((r for r in ranks if r.process.poll() is None), None), True
            if not stopped:
                _say(f"{signal.Signals(number).name} received: the ranks save a checkpoint and stop")
            stopped = True
            for rank in ranks:
                rank.process.send_signal(signal.SIGUSR1 if number == signal.SIGUSR1 else signal.SIGTERM)
        codes = [rank.process.poll() for rank in ranks]
        failed = [rank for rank, code in zip(ranks, codes, strict=True) if code]
        if failed:
            # Killed from outside comes first: the others then fail because they lost it.
            return min(failed, key=lambda rank: rank.process.returncode > 0), stopped
        if all(code == 0 for code in codes):
            return None, stopped
        time.sleep(0.05)


def _end(ranks: Sequence[_LocalRank]) -> None:
    running = [rank.process for rank in ranks if rank.process.poll() is None]
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in running:
            if process.poll() is None:
                os.killpg(process.pid, number)
        deadline = time.monotonic() + KILL_AFTER_S
        while time.monotonic() < deadline and any(process.poll() is None for process in running):
            time.sleep(0.05)


def _report(failed: _LocalRank, stopped: bool) -> int:
    code = failed.process.returncode
    if stopped and code <= 0:
        _say("stopped by a signal before a checkpoint was saved; run the same command again to resume from the last")
        return 5
    for line in failed.tail():
        print(f"[rank {failed.rank}] {line}", file=sys.stderr)
    log = f"; its log: {failed.log}" if failed.log else ""
    if code < 0:
        name = signal.Signals(-code).name
        hint = " (out of memory? see `dmesg`)" if -code == signal.SIGKILL else ""
        _say(f"rank {failed.rank} was ended by {name}{hint}; the others were ended{log}")
        from_outside = -code in (signal.SIGKILL, *STOP_SIGNALS)
        return 5 if from_outside else 1
    _say(f"rank {failed.rank} failed with exit code {code}; the others were ended{log}")
    return code if code <= 5 else 1


def _say(text: str) -> None:
    print(f"runner: {text}", file=sys.stderr, flush=True)


def read_ephemeral_ports(path: Path = Path("/proc/sys/net/ipv4/ip_local_port_range")) -> tuple[int, int]:
    """This machine's range of ports for outgoing connections; Linux's default where it cannot be read."""
    try:
        low, high = path.read_text().split()
        return int(low), int(high)
    except (OSError, ValueError):
        return EPHEMERAL_PORTS
