"""Ranks on the nodes of a Slurm job: started with srun, and watched.

This code runs in the batch script, or in an salloc shell. Slurm signals the ranks; they save a
checkpoint, write the file `stopped` and exit.
"""

from __future__ import annotations

import os
import platform
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO

from runner.errors import (
    IncompleteError,
    UsageError,
    human_count,
    say,
)
from runner.launch.network import Master, free_port, read_ephemeral_ports, with_port
from runner.launch.outcome import RanksExit
from runner.launch.ranks import RANK_FLAG, TORCH_VARIABLES, Start
from runner.launch.watch import HangDetector, recorded_signals, wait_for_end
from runner.processes import die_with_parent, threads_variable
from runner.slurm.environment import (
    BINDS_GPUS,
    SlurmJobEnvironment,
    cpus_per_task,
    host_names,
    master_port,
    srun_command,
    tasks_per_node,
)
from runner.slurm.jobs import ask, over_job, running_step, step_name

TRIES = 5
"""How often a busy Slurm controller is asked before the launcher ends without knowing."""

_TASK_ENDED = re.compile(r"srun: error: \S+: tasks? (?P<rank>\d+)[\d,-]*: (?P<how>.*)")


def srun_environment(
    job: SlurmJobEnvironment, environ: Mapping[str, str], port: int, address: str = ""
) -> dict[str, str]:
    """Returns the environment of the ranks: ours, without stale rank variables. Pure.

    Each rank sees all GPUs that the job has on its node, and takes its own by local rank.

    Args:
        port: the TCP port of rank 0.
        address: the address of rank 0. Empty: the ranks find it themselves.
    """
    stale = {*TORCH_VARIABLES, "LOCAL_WORLD_SIZE", "SLURM_EXPORT_ENV", *BINDS_GPUS}
    if not address:
        stale.remove("MASTER_ADDR")
    threads, _ = threads_variable(environ, cpus_per_task(job, environ))
    return {
        "PYTHONUNBUFFERED": "1",
        **{name: value for name, value in environ.items() if name not in stale},
        **threads,
        RANK_FLAG: "1",
        **({"MASTER_ADDR": address} if address else {}),
        "MASTER_PORT": str(port),
    }


def run_srun(
    argv: Sequence[str],
    start: Start,
    job: SlurmJobEnvironment,
    watch: HangDetector,
    environ: Mapping[str, str],
) -> RanksExit:
    """Runs `argv` as the ranks of this job and waits for them.

    Slurm itself signals the ranks (`--signal=TERM@300`). A stop signal to this process is passed
    on as SIGUSR1, which srun forwards to each rank; on SIGTERM srun would kill them. If the ranks
    hang, the stack of each rank is printed and the ranks are ended.

    Args:
        argv: the command of a rank.
        watch: finds ranks that hang.

    Raises:
        UsageError: rank 0 has no address, or srun cannot be started.
    """
    port = free_port(master_port(job.job_id, 0, read_ephemeral_ports()), environ)
    name = step_name(platform.node(), os.getpid())
    master = start.find_rank_0(environ)
    options = (
        f"--job-name={name}",  # a launcher that finds the run folder locked asks Slurm by this name
        "--kill-on-bad-exit=1",  # else the other ranks wait in a collective until it times out
        "--label",  # each line shows the rank that wrote it
    )
    command = srun_command(job, environ, start.on_node, (*options, *argv))
    variables = srun_environment(job, environ, port, master.address)
    _describe(job, command, master, port)
    code, first, hung = _srun(command, variables, watch)
    how = first["how"] if first else ""
    if code < 0:
        say(f"srun was ended by {signal.Signals(-code).name}")
        end_ranks(job.job_id, os.getpid())
    if code and not how and not hung and (error := over_job(environ)):
        raise error
    return RanksExit(
        in_job=True,
        code=_code_of_first_task(code, how),
        rank=int(first["rank"]) if first else None,
        words=how or f"srun exit code {code}",
        hung=hung,
        signals=frozenset((signal.SIGTERM, signal.SIGUSR1) if how else ()),
    )


def _describe(job: SlurmJobEnvironment, command: Sequence[str], master: Master, port: int) -> None:
    ranks = tasks_per_node(job)
    address = with_port(master.address or host_names(job.nodes)[0], port)
    say(
        f"job {job.job_id}: {job.num_nodes} x {human_count(ranks, 'rank')} on {job.nodes}; "
        f"rank 0 listens on {address} ({master.reason})"
    )
    if master.ignored:
        say(master.ignored)
    if line := threads_variable(os.environ, cpus_per_task(job, os.environ))[1]:
        say(line)
    if job.restart_count:
        say(f"restart {job.restart_count} of this job")
    if job.gpus_on_node is not None and job.gpus_on_node > ranks:
        say(
            f"each node has {job.gpus_on_node} GPUs but {human_count(ranks, 'rank')}: "
            f"{human_count(job.gpus_on_node - ranks, 'GPU')} unused "
            f"(ask for --ntasks-per-node={job.gpus_on_node})"
        )
    say(" ".join(command))


def _srun(
    command: Sequence[str], variables: Mapping[str, str], watch: HangDetector
) -> tuple[int, re.Match[str] | None, bool]:
    """Runs srun and watches the ranks.

    Returns:
        srun's exit code, what it printed of the first task that failed, and whether ranks hung.
    """
    ends: list[re.Match[str]] = []

    def copy(stderr: IO[bytes]) -> None:
        for line in stderr:
            with suppress(OSError):  # our terminal is gone: the ranks must not end because of it
                sys.stderr.buffer.write(line)
                sys.stderr.buffer.flush()
            ends.extend(filter(None, [_TASK_ENDED.match(line.decode("utf-8", "replace"))]))

    with recorded_signals() as received:
        try:
            process = subprocess.Popen(
                list(command),
                env=dict(variables),
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                # On SIGTERM srun ends the ranks; SIGKILL would leave them running.
                preexec_fn=die_with_parent(signal.SIGTERM),
            )
        except FileNotFoundError:
            raise UsageError(
                "srun is not on PATH inside this job",
                "Load the site's Slurm module in slurm.setup.",
            ) from None
        assert process.stderr is not None
        reader = threading.Thread(target=copy, args=(process.stderr,), daemon=True)
        reader.start()
        waited = wait_for_end([process], received, watch, lambda _number: signal.SIGUSR1)
        if process.poll() is None:
            process.terminate()  # srun ends the tasks, and kills the rest after KillWait
        code = process.wait()
        reader.join(timeout=5)  # a process of a rank may hold the pipe open after srun's end
    return code, next(iter(ends), None), waited.hung


def end_ranks(job_id: int, launcher: int) -> None:
    """Ends the ranks of a launcher on this machine, and waits for them.

    Used after the launcher, or its srun, was killed.

    Args:
        launcher: the launcher's process id.
    """
    name = step_name(platform.node(), launcher)
    seen = unanswered = 0
    while (step := running_step(job_id, name)) != "" and unanswered < TRIES:
        if step and seen % 60 == 0:  # once a minute: scancel may be lost, and KillWait is 30 s
            say(f"the ranks still run: scancel {step}")
            with suppress(IncompleteError):
                ask("scancel", step)
        seen += bool(step)
        unanswered += step is None
        time.sleep(1)
    if step is None:
        say(f"Slurm does not report whether the ranks ended: see `squeue --steps --jobs={job_id}`")


def _code_of_first_task(code: int, how: str) -> int:
    """The exit code of the task that ended first; negative: the signal that ended it.

    srun ends the other tasks after one fails and returns *their* code, so the first task decides.

    Args:
        code: of srun.
        how: what srun printed of the first task that ended badly: an exit code, or the text of
            strsignal(3).
    """
    if code == 0:
        return 0
    if exited := re.match(r"Exited with exit code (\d+)", how):
        return int(exited[1])
    if how.startswith("Out Of Memory"):
        return -signal.SIGKILL
    for number in signal.Signals:
        if how and how.startswith(signal.strsignal(number) or " "):
            return -number
    return 128 - code if code > 128 and not how else code
