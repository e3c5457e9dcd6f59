"""Ranks on the nodes of a Slurm job: started with srun, stopped by signal, requeued.

Called in the batch script (or an salloc shell). The ranks save and leave by themselves when Slurm signals them;
what they leave behind is a sentinel file, and requeueing happens here, in ordinary code, after all of them are gone.
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
from pathlib import Path
from typing import IO

from runner.errors import IncompleteError, UsageError
from runner.jobs import running_step, step_name
from runner.master import free_port, master_address, read_ephemeral_ports
from runner.ranks import RANK_FLAG, SENTINEL, TORCH_VARIABLES, die_with_parent, recorded_signals, say, tell_of_hang
from runner.slurm import SlurmJobEnvironment, master_port, task_counts
from runner.slurm_commands import ask
from runner.vitals import ASK_FOR_STACKS
from runner.watch import Watch

MAX_REQUEUES = 32
"""A job that was requeued this often is left alone: something other than progress keeps bringing it back."""

SCONTROL_TIMEOUT_S = 40
TRIES = 5
"""How often a busy controller is asked."""

_TOLD_TO_STOP = ("Terminated", "User defined signal 1")
"""How srun describes ranks that met a stop signal while they were still importing: nothing saved, nothing wrong."""

_TASK_ENDED = re.compile(r"srun: error: (?P<host>\S+): tasks? (?P<ranks>[\d,-]+): (?P<how>.*)")


def tasks_per_node(job: SlurmJobEnvironment) -> int:
    """How many ranks a node gets: what the job asked for, evenly.

    Raises:
        UsageError: the job's tasks do not divide among its nodes.
    """
    if job.tasks_per_node is not None:
        return job.tasks_per_node
    tasks = job.tasks or job.num_nodes
    if tasks % job.num_nodes:
        raise UsageError(
            f"{tasks} tasks do not divide among {job.num_nodes} nodes",
            "Give sbatch --ntasks-per-node instead of --ntasks.",
        )
    return tasks // job.num_nodes


def cpus_per_task(job: SlurmJobEnvironment, environ: Mapping[str, str]) -> int:
    """The CPUs of one rank: as asked for, else an equal share of what the job holds on its smallest node."""
    held = environ.get("SLURM_JOB_CPUS_PER_NODE")
    return job.cpus_per_task or max(1, min(task_counts(held)) // tasks_per_node(job) if held else 1)


def srun_command(job: SlurmJobEnvironment, environ: Mapping[str, str], argv: Sequence[str], name: str) -> list[str]:
    """The command that starts `argv` once per rank, as a step called `name`. Pure."""
    ranks = tasks_per_node(job)
    return [
        "srun",
        f"--job-name={name}",  # whoever finds the run folder held asks for the step by it
        # Spelled out: srun alone may place 3 + 1, and since 22.05 it ignores the job's --cpus-per-task.
        f"--nodes={job.num_nodes}",
        f"--ntasks={job.num_nodes * ranks}",
        f"--ntasks-per-node={ranks}",
        f"--cpus-per-task={cpus_per_task(job, environ)}",
        "--kill-on-bad-exit=1",  # one rank gone, the rest would wait in a collective until it times out
        "--mpi=none",  # ranks meet through MASTER_ADDR; a site's default MPI plugin can only fail
        "--export=ALL",  # sbatch --export=NONE would otherwise strip PATH from the tasks
        "--input=none",
        "--label",  # each line says which rank wrote it
        *argv,
    ]


def srun_environment(job: SlurmJobEnvironment, environ: Mapping[str, str], port: int) -> dict[str, str]:
    """The ranks' environment: all of ours, where rank 0 listens, and no rank variable left from elsewhere."""
    stale = {*TORCH_VARIABLES, "LOCAL_WORLD_SIZE", "SLURM_EXPORT_ENV"}
    return {
        "OMP_NUM_THREADS": str(cpus_per_task(job, environ)),
        "PYTHONUNBUFFERED": "1",
        **{name: value for name, value in environ.items() if name not in stale},
        RANK_FLAG: "1",
        "MASTER_ADDR": master_address(environ, job.nodes, job.num_nodes),
        "MASTER_PORT": str(port),
    }


def run_batch(
    argv: Sequence[str],
    run_folder: Path,
    environ: Mapping[str, str] | None = None,
    hang_after_s: float | None = None,
) -> int:
    """Runs `argv` as the ranks of this job and waits; requeues the job if they saved because of a signal.

    Slurm signals the ranks itself (`--signal=TERM@300`). A stop signal that reaches this process is handed on as
    SIGUSR1, which srun gives to every rank; SIGTERM would make srun kill them. A hang is told with each rank's stack;
    then the ranks are ended.

    Returns:
        0 done; the first failing rank's code if it is one of the contract (1 otherwise); 5 stopped: submit again.

    Raises:
        UsageError: not in a job, tasks that do not divide, no address for rank 0, or srun cannot be started.
    """
    environ = os.environ if environ is None else environ
    job = SlurmJobEnvironment.from_environ(environ)
    if job is None:
        raise UsageError("this is not inside a Slurm job", "Submit it with `runner submit`.")
    port = free_port(master_port(job.job_id, 0, read_ephemeral_ports()), environ)
    name = step_name(platform.node(), os.getpid())
    command, variables = srun_command(job, environ, argv, name), srun_environment(job, environ, port)
    _describe(job, command, variables)
    sentinel = run_folder / SENTINEL
    sentinel.unlink(missing_ok=True)
    watch = Watch(run_folder / "logs", job.num_nodes * tasks_per_node(job), hang_after_s)
    code, first_end, hang = _srun(command, variables, watch)
    if code < 0:
        say(f"srun was ended by {signal.Signals(-code).name}")
        end_ranks(job.job_id, os.getpid())
    if hang:
        say("the ranks were ended; submit the run again to resume from its last checkpoint")
        return 5
    if sentinel.exists():
        # Rank 0 wrote it after everyone had saved: whatever happened while the ranks went away, they can resume.
        sentinel.unlink()
        return _requeue(job)
    if first_end.startswith(_TOLD_TO_STOP):
        say("the ranks were told to stop before they could save")
        return _requeue(job)
    if code:
        for line in watch.report_failure():
            print(line, file=sys.stderr)
    return _exit_code(code, first_end)


def _describe(job: SlurmJobEnvironment, command: Sequence[str], variables: Mapping[str, str]) -> None:
    ranks = tasks_per_node(job)
    where = f"{variables['MASTER_ADDR']}:{variables['MASTER_PORT']}"
    say(f"job {job.job_id}: {job.num_nodes} x {ranks} ranks on {job.nodes}; rank 0 listens on {where}")
    if job.restart_count:
        say(f"restart {job.restart_count} of this job")
    if job.gpus_on_node is not None and job.gpus_on_node > ranks:
        say(
            f"each node has {job.gpus_on_node} GPUs but {ranks} ranks: "
            f"{job.gpus_on_node - ranks} stay idle (ask for --ntasks-per-node={job.gpus_on_node})"
        )
    say(" ".join(command))


def _srun(command: Sequence[str], variables: Mapping[str, str], watch: Watch) -> tuple[int, str, bool]:
    """Runs srun. Returns its exit code, what it first said about a task that ended badly, and whether ranks hung."""
    first_end: list[str] = []
    hang = False

    def pass_on(stderr: IO[bytes]) -> None:
        for line in stderr:
            sys.stderr.buffer.write(line)
            sys.stderr.buffer.flush()
            match = _TASK_ENDED.match(line.decode("utf-8", "replace").rstrip())
            if match and not first_end:
                first_end.append(match["how"])

    with recorded_signals() as received:
        try:
            process = subprocess.Popen(
                list(command),
                env=dict(variables),
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                preexec_fn=die_with_parent(signal.SIGTERM),  # upon which it ends the ranks; SIGKILL would leave them
            )
        except FileNotFoundError:
            raise UsageError("srun is not on PATH inside this job", "Load the site's Slurm module in setup.") from None
        assert process.stderr is not None
        reader = threading.Thread(target=pass_on, args=(process.stderr,), daemon=True)
        reader.start()
        while process.poll() is None:
            while received:
                say(f"{signal.Signals(received.popleft()).name} received: the ranks save a checkpoint and stop")
                process.send_signal(signal.SIGUSR1)
            if not hang and (silent := watch.silent()):
                hang = True
                process.send_signal(ASK_FOR_STACKS)
                tell_of_hang(watch, silent)
                process.terminate()  # srun kills the tasks, and those that do not answer after Slurm's KillWait
            time.sleep(0.1)
        reader.join(timeout=5)
    return process.returncode, first_end[0] if first_end else "", hang


def end_ranks(job_id: int, launcher: int) -> None:
    """Ends the ranks of a launcher of this machine that was killed, or whose srun was, and waits for them."""
    name = step_name(platform.node(), launcher)
    seen = unanswered = 0
    while (step := running_step(job_id, name)) != "" and unanswered < TRIES:
        if step and seen % 60 == 0:
            say(f"the ranks still run: scancel {step}")
            with suppress(IncompleteError):
                ask("scancel", step)
        seen += bool(step)
        unanswered += step is None
        time.sleep(1)
    if step is None:
        say(f"Slurm does not say whether its ranks have ended: see `squeue --steps --jobs={job_id}`")


def _exit_code(code: int, first_end: str) -> int:
    """srun ends the other tasks when one fails and then returns *their* code, so the first end decides."""
    if code == 0:
        return 0
    exited = re.match(r"Exited with exit code (\d+)", first_end)
    if exited:
        return int(exited[1]) if int(exited[1]) <= 5 else 1
    ended_from_outside = first_end.startswith(("Killed", *_TOLD_TO_STOP, "Out Of Memory"))
    if ended_from_outside or code < 0 or (not first_end and code > 128):
        say(f"the ranks were ended from outside ({first_end or f'srun exit code {code}'})")
        say("submit the run again to resume from its last checkpoint")
        return 5
    return 1


def _requeue(job: SlurmJobEnvironment) -> int:
    """Puts the job back into the queue, if Slurm still counts it as running and the bound is not reached."""
    shown = _scontrol("show", "job", str(job.job_id), "--oneliner")
    if shown.returncode != 0:
        say(f"stopped: Slurm does not answer ({shown.stderr.strip()}); submit the run again to resume")
        return 5
    state = dict(word.partition("=")[::2] for word in shown.stdout.split())
    if state.get("BatchFlag") != "1":
        say("stopped by a signal; run the same command again to resume (only batch jobs are requeued)")
        return 5
    if state.get("JobState") != "RUNNING":
        say(f"stopped: Slurm ends the job ({state.get('JobState')}), so it is not requeued; submit it again to resume")
        return 5
    if job.restart_count >= MAX_REQUEUES:
        say(f"stopped: requeued {job.restart_count} times already; submit the run again to resume")
        return 5
    requeued = _scontrol("requeue", str(job.job_id))
    if requeued.returncode != 0:
        say(f"Slurm refused to requeue the job: {requeued.stderr.strip()}; submit the run again to resume")
        return 5
    say(f"job {job.job_id} is back in the queue (restart {job.restart_count + 1} of at most {MAX_REQUEUES})")
    # Slurm ends this script as part of the requeue; leaving first would only race with it.
    time.sleep(60)
    return 5


def _scontrol(*arguments: str, tries: int = TRIES) -> subprocess.CompletedProcess[str]:
    """Asks Slurm's controller, again if it is busy: a night's work waits for the answer."""
    for left in reversed(range(tries)):
        try:
            done = subprocess.run(
                ["scontrol", *arguments], capture_output=True, text=True, timeout=SCONTROL_TIMEOUT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            done = subprocess.CompletedProcess(arguments, 1, "", str(error))
        if done.returncode == 0:
            break
        if left:
            time.sleep(5)
    return done
