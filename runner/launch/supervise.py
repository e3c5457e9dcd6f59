"""The ranks of every command: started here or by srun, watched, judged, and requeued if stopped.

The first steps are the trial of an automatic `batch.micro`. Where they end because memory ran out,
the ranks are started again with half of it and twice the accumulation, until it fits or is 1. What
did not fit is kept in the run folder: the next start of the run begins with what did.

On the nodes of a job, this code runs in the batch script, or in an salloc shell. Slurm signals the
ranks; they save a checkpoint, write the file `stopped` and exit.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import IO

from runner.child import runner_command
from runner.errors import say
from runner.from_stage import IncompleteError, UsageError, human_count, print_line
from runner.job import node_local
from runner.job.host_memory import is_limited
from runner.job.plan import MicroBound, can_be_smaller, with_micro
from runner.job.run import Run
from runner.launch.network import (
    GLOO,
    LOOPBACK,
    Master,
    free_port,
    free_port_here,
    read_ephemeral_ports,
    with_port,
)
from runner.launch.outcome import Outcome, RanksExit, Traces, outcome_of
from runner.launch.ranks import MEETING_FILE, RANK_FLAG, TORCH_VARIABLES, RankInfo, Start
from runner.launch.resolved import Resolved, read_resolved, tried_with, write_bound, write_resolved
from runner.launch.watch import HangDetector, Waited, recorded_signals, wait_for_end
from runner.processes import die_with_parent, threads_variable, usable_cores, why_ended
from runner.run_folder.heartbeat import read_failures, tries
from runner.run_folder.layout import RunFolder
from runner.run_folder.training_state import by_step_newest_first
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
from runner.slurm.requeue import requeue


def start_work(resolved: Resolved, work: str, start: Start, environ: Mapping[str, str]) -> Outcome:
    """Starts the ranks of a run for one kind of work, and waits for them.

    To train, they are started again where the first steps did not fit (`halve_micro`).

    Args:
        resolved: what is decided about the run; is written into the run folder for rank 0.
        work: what the ranks do: a WORK of `runner rank`.
        start: which ranks.

    Raises:
        StageError: as for `start_ranks` and `environment_for_ranks`; before a rank was started.
    """
    run = resolved.run
    write_resolved(resolved)
    prefix = environment_for_ranks(run, start, environ)
    argv = runner_command("rank", str(run.folder.root), work, prefix=prefix)
    if start.job is not None:  # a container's words bring the Python of the ranks
        argv = [*run.config.slurm.around_ranks, *argv]
    hang_after_s = None if run.config.hang_after == "auto" else run.config.hang_after

    def again(outcome: Outcome) -> bool:
        return work == "train" and halve_micro(run.folder, outcome, environ)

    return start_ranks(argv, start, run.folder, environ, again, hang_after_s=hang_after_s)


def environment_for_ranks(run: Run, start: Start, environ: Mapping[str, str]) -> Path | None:
    """The prefix of the ranks' environment on their nodes; None: that of this process.

    Raises:
        StageError: the ranks would run another environment than the run file names.
    """
    wanted, environment = run.config.environment, run.inputs.environment
    if wanted is None or environment is None:
        return None
    if start.job is not None:
        words = run.config.slurm.srun
        return node_local.arrange(wanted.node_local, environment, environ, print_line, words=words)
    node_local.check_running(environment)
    return None


def start_ranks(
    argv: Sequence[str],
    start: Start,
    folder: RunFolder,
    environ: Mapping[str, str],
    again: Callable[[Outcome], bool] = lambda _outcome: False,
    *,
    hang_after_s: float | None = None,
) -> Outcome:
    """Runs `argv` as ranks, waits for them, and prints how they ended.

    Args:
        argv: the command of a rank.
        start: which ranks. A Slurm job that was stopped by a signal is requeued.
        again: whether to start them once more after such an outcome, of which nothing is printed.
        hang_after_s: seconds without a heartbeat that count as a hang. None: chosen automatically.

    Raises:
        StageError: as for `run_srun`; before a rank was started.
    """
    while True:
        outcome = _run(argv, start, folder, environ, hang_after_s)
        if not again(outcome):
            break
    for line in outcome.report:
        print(line, file=sys.stderr)
    for line in outcome.messages:
        say(line)
    if outcome.kind == "stopped" and start.job is not None:
        requeue(environ)
    return outcome


def _run(
    argv: Sequence[str],
    start: Start,
    folder: RunFolder,
    environ: Mapping[str, str],
    hang_after_s: float | None,
) -> Outcome:
    """Runs the ranks once; returns how they ended."""
    folder.stopped.unlink(missing_ok=True)
    watch = HangDetector(folder.logs, start.world_size, hang_after_s)
    begun = {path.name: path.stat().st_size for path in folder.logs.glob("rank-*.log")}
    if start.job is None:
        ended = run_local(argv, start, folder.logs, watch, environ)
    else:
        ended = run_srun(argv, start, start.job, watch, environ)
    log = folder.logs / f"rank-{ended.rank}.log"
    left = Traces(
        saved=folder.stopped.exists(),
        newest=next((path.name for path in by_step_newest_first(folder.checkpoints)), ""),
        failures=tuple(read_failures(folder.logs)),
        last_words=_written_since(log, begun.get(log.name, 0)),
    )
    outcome = outcome_of(ended, left)
    if start.job is not None or "SLURM_JOB_ID" not in environ:  # else the job's script looks for it
        folder.stopped.unlink(missing_ok=True)
    return outcome


TAIL_BYTES = 2**16
"""How much of a rank's log is read to find out why it ended."""


def _written_since(log: Path, size: int) -> str:
    """What was written to a log after it had this size, or the end of that; empty: nothing."""
    with suppress(OSError), log.open("rb") as file:
        file.seek(max(size, file.seek(0, os.SEEK_END) - TAIL_BYTES))
        return file.read().decode("utf-8", "replace")
    return ""


def halve_micro(folder: RunFolder, outcome: Outcome, environ: Mapping[str, str]) -> bool:
    """Arranges another attempt with half of `batch.micro`, where the first steps did not fit.

    A rank that was killed counts where a limit of memory may have been the reason.

    Args:
        folder: of the run.
        outcome: how the ranks of the last attempt ended.

    Returns:
        Whether to start the ranks again; says so, with the reason.
    """
    if outcome.kind != "no_memory" or (outcome.killed and not is_limited(environ)):
        return False
    resolved = read_resolved(folder)
    plan, config = resolved.plan, resolved.run.config
    # `tries` is shown in the first steps only. Before them the model itself does not fit; after
    # them something else grew. A smaller batch helps neither.
    if plan is None or not can_be_smaller(config, plan) or not tries(folder.logs):
        return False
    why = f"{plan.micro} did not fit ({outcome.cause})"
    bound = MicroBound(tried_with(resolved), plan.micro // 2, why)
    write_bound(folder, bound)
    smaller = with_micro(config, plan, bound)
    # Without plan and device: rank 0 decides both again, for the devices that the next ranks see.
    write_resolved(
        replace(resolved, attempt=resolved.attempt + 1, bound=bound, plan=None, device=None)
    )
    say(
        f"batch.micro: {why}; the {human_count(plan.world_size, 'rank')} start again with "
        f"{smaller.micro}, accumulation {smaller.accumulation}"
    )
    return True


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
    common, port = _common_environment(environ, start.world_size, meeting), free_port_here()
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
                ranks.append(_start_rank(argv, {**common, **info.variables()}, log))
            waited = wait_for_end(ranks, received, watch, _passed_on)
        finally:
            _end_all(ranks)
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


def _common_environment(
    environ: Mapping[str, str], processes: int, meeting: Path
) -> dict[str, str]:
    threads, line = threads_variable(environ, max(1, usable_cores() // processes))
    if line:
        say(line)
    # A later entry replaces an earlier one of the same name.
    return {
        # Defaults, which the user's variables replace.
        # Otherwise the last lines of a killed rank are lost.
        "PYTHONUNBUFFERED": "1",
        # Otherwise gloo looks up this machine's own name, in DNS if /etc/hosts lacks it.
        GLOO: LOOPBACK,
        **environ,
        # These replace the user's variables.
        # Otherwise torch uses every core in every rank.
        **threads,
        RANK_FLAG: "1",
        MEETING_FILE: str(meeting / "ranks"),
    }


def _start_rank(
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


KILL_AFTER_S = 5.0
"""A rank that has not ended by then waits inside a collective, where it cannot save any more."""


def _end_all(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    running = [process for process in ranks if process.poll() is None]
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in running:
            if process.poll() is None:
                os.killpg(process.pid, number)
        deadline = time.monotonic() + KILL_AFTER_S
        while time.monotonic() < deadline and any(process.poll() is None for process in running):
            time.sleep(0.05)  # most ranks end within one look


def srun_environment(
    job: SlurmJobEnvironment, environ: Mapping[str, str], port: int, address: str = ""
) -> dict[str, str]:
    """Returns the environment of the ranks: ours, without stale rank variables. Pure.

    Each rank sees all GPUs that the job has on its node, and takes its own by local rank.

    Args:
        port: the TCP port of rank 0.
        address: the address of rank 0. Empty: the ranks find it themselves.
    """
    # Without an address, the ranks read the user's MASTER_ADDR; with one, it is replaced below.
    kept = () if address else ("MASTER_ADDR",)
    stale = {*TORCH_VARIABLES, "LOCAL_WORLD_SIZE"}.difference(kept)
    # Left by `sbatch --export`: srun would pass on only the variables that it names.
    stale |= {"SLURM_EXPORT_ENV", *BINDS_GPUS}
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

    def wait(process: subprocess.Popen[bytes], received: deque[int]) -> Waited:
        return wait_for_end([process], received, watch, lambda _number: signal.SIGUSR1)

    return run_step(job, command, variables, wait, environ)


def run_step(
    job: SlurmJobEnvironment,
    command: Sequence[str],
    variables: Mapping[str, str],
    wait: Wait,
    environ: Mapping[str, str],
) -> RanksExit:
    """Runs a command of srun, and ends what it leaves where srun itself was killed.

    Args:
        command: of `srun_command`.
        variables: of the tasks.
        wait: as for `srun`.

    Raises:
        UsageError: srun cannot be started, or the job of these variables is over.
    """
    code, first, hung = srun(command, variables, wait)
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
        # Slurm signals the ranks past this process, so each stop signal counts as sent. Only
        # srun's words say that a rank ended by one: without them, the code is srun's own.
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


_TASK_ENDED = re.compile(r"srun: error: \S+: tasks? (?P<rank>\d+)[\d,-]*: (?P<how>.*)")


Wait = Callable[[subprocess.Popen[bytes], "deque[int]"], Waited]
"""Waits for the end of a process; it gets the stop signals that this process receives."""


def srun(
    command: Sequence[str], variables: Mapping[str, str], wait: Wait
) -> tuple[int, re.Match[str] | None, bool]:
    """Runs srun and watches what it starts.

    Args:
        wait: waits for its end; srun is ended where it still runs afterwards.

    Returns:
        srun's exit code, what it printed of the first task that failed, and whether ranks hung.
    """
    ends: list[re.Match[str]] = []

    def copy(stderr: IO[bytes]) -> None:
        for line in stderr:
            with suppress(OSError):  # our terminal is gone: the ranks must not end because of it
                sys.stderr.buffer.write(line)
                sys.stderr.buffer.flush()
            if ended := _TASK_ENDED.match(line.decode("utf-8", "replace")):
                ends.append(ended)

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
        waited = wait(process, received)
        if process.poll() is None:
            process.terminate()  # srun ends the tasks, and kills the rest after KillWait
        code = process.wait()
        reader.join(timeout=5)  # a process of a rank may hold the pipe open after srun's end
    return code, next(iter(ends), None), waited.hung


MAX_UNANSWERED = 5
"""How often a busy Slurm controller may fail to answer before the launcher ends without knowing."""


def end_ranks(job_id: int, launcher: int) -> None:
    """Ends the ranks of a launcher on this machine, and waits for them.

    Used after the launcher, or its srun, was killed.

    Args:
        launcher: the launcher's process id.
    """
    name = step_name(platform.node(), launcher)
    seen = unanswered = 0
    while unanswered < MAX_UNANSWERED:
        step = running_step(job_id, name)
        if step == "":  # Slurm answers that no rank runs
            return
        if step is None:  # Slurm does not answer
            unanswered += 1
        else:
            if seen % 60 == 0:  # once a minute: scancel may be lost, and KillWait is 30 s
                say(f"the ranks still run: scancel {step}")
                with suppress(IncompleteError):
                    ask("scancel", step)
            seen += 1
        time.sleep(1)  # so 60 looks are a minute
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
        # So srun names a task that the kernel ended in the job's cgroup, which it does by SIGKILL.
        return -signal.SIGKILL
    for number in signal.Signals:
        name = signal.strsignal(number)
        if name and how.startswith(name):
            return -number
    if not how and code > 128:
        # As a shell does, srun adds 128 to the number of the signal that ended a task.
        return -(code - 128)
    return code
