"""Does a command that was typed behind `runner exec` start all ranks of its job, once?

Nothing is started or changed here. A command that would train several times over the same files, or
on one node of several, is refused. The remedy is a run file with this command: a run knows how its
command starts on each node (`runner.job.launchers`).
"""

from __future__ import annotations

import re
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from runner.from_stage import UsageError, scalar
from runner.job.commands import (
    STARTS_NODES,
    inner_command,
    launcher_in,
    read_command,
    shell_code,
    shell_script,
    starter_in,
)
from runner.job.launchers import with_torchrun
from runner.launch.ranks import MPI_VARIABLES, LaunchedProcess, task_of
from runner.slurm.environment import SlurmJobEnvironment

_MEETS = re.compile(r"--(rdzv|node|machine|master|main_process_ip)|PET_RDZV_ENDPOINT|NODE_RANK")
"""Words, and variables, with which the launchers of several nodes find each other."""
_ONE_PER_NODE = re.compile(r"SLURM_(JOB_)?(NNODES|NUM_NODES|NODEID)")
"""Variables with which a line for several nodes counts one launcher on each."""
_ONE_OF_TASKS = re.compile(
    "|".join(["SLURM_PROCID|SLURM_LOCALID", *(f"{n[1]}|{n[3]}" for n in MPI_VARIABLES)])
)
"""Variables with which a shell script starts something in one task, or counts the tasks."""


def check_all_nodes(
    command: Sequence[str], bundle: Path, environ: Mapping[str, str], script: bytes
) -> None:
    """Refuses a command that would not train once, on all nodes of its job.

    Args:
        script: what a shell would run of `command`.

    Raises:
        UsageError: it would start processes on nodes without the bundle, or train on one node of
            several, or several times; the remedy has the run file that trains once.
    """
    job, task = SlurmJobEnvironment.from_environ(environ), task_of(environ)
    nodes, text = job.num_nodes if job else 1, shell_code(script)
    problem = "" if task is None else _several_launchers(command, environ, text, task)
    starts_others = Path(command[0]).name in STARTS_NODES or starter_in(text) is not None
    if not problem and nodes > 1 and (task is None or starts_others):
        problem = (
            f"this job has {nodes} nodes, and the bundle would be served, and `{command[0]}` "
            "started, on this one alone."
        )
    if not problem:
        return
    if task is not None and task.rank:  # the first task prints the error for all
        time.sleep(1)  # srun -K and mpirun end all tasks with the first that ends
        sys.exit(UsageError.exit_code)
    nodes = max(nodes, task.world_size // task.local_world_size if task else 1)
    raise UsageError(problem, _as_run(command, bundle, environ, text, nodes))


def _several_launchers(
    command: Sequence[str], environ: Mapping[str, str], text: str, task: LaunchedProcess
) -> str:
    """What is wrong with a launcher of ranks in each of several tasks; empty: nothing.

    It is the whole training, several times: where there are several tasks on a node, and they do
    not count themselves as nodes; or on several nodes, where they do not meet.
    """
    tasks = max(task.step.tasks_per_node) if task.step else task.local_world_size
    nodes = task.world_size // tasks
    launcher = read_command(command).launcher or " ".join(launcher_in(text).split()[:1])
    both = f"{' '.join(command)}\n{text}"
    meets = _MEETS.search(" ".join([both, *environ]))
    if not launcher or _ONE_OF_TASKS.search(both):
        return ""
    if tasks > 1 and not (meets and not _ONE_PER_NODE.search(both)):
        return (
            f"{task.launcher} started {tasks} tasks on this node, and in each of them `{launcher}` "
            f"would start ranks of its own: the whole training {tasks} times, over the same files."
        )
    if nodes > 1 and not meets and "SLURM_NODEID" not in both:
        return (
            f"{task.launcher} started `{launcher}` on each of {nodes} nodes without the address of "
            "the first: each would train alone, over the same files."
        )
    return ""


def _as_run(
    command: Sequence[str], bundle: Path, environ: Mapping[str, str], text: str, nodes: int
) -> str:
    """The remedy: a run file that starts this command once, on all nodes."""
    gpus = environ.get("SLURM_GPUS_ON_NODE", "")
    slurm = [f"nodes: {nodes}", *([f"gpus_per_node: {gpus}"] if gpus else [])]
    line, typed = shlex.join(command), read_command(command)
    if Path(typed.own[0]).name in STARTS_NODES:
        line = shlex.join(inner_command(command))
        slurm += [] if read_command(line.split()).launcher else [f"tasks_per_node: {gpus or 1}"]
    elif not typed.launcher and starter_in(text) is None:
        line = launcher_in(text) or with_torchrun(typed) or line
    return (
        f"Write a run file, such as run.yaml:\n  format: 1\n  command: {scalar(line)}\n"
        f"  slurm: {{{', '.join(slurm)}}}\n"
        f"Then, outside this job: runner submit run.yaml --bundle {shlex.quote(str(bundle))}"
    )


def note_on_tasks(command: Sequence[str], environ: Mapping[str, str], script: bytes) -> str:
    """One line where srun started several tasks and nothing tells a script of the others.

    Trainer and accelerate then train the whole model once per task, without an error.

    Args:
        script: what a shell would run of `command`.
    """
    tasks = int(environ.get("SLURM_STEP_NUM_TASKS") or 1)
    starts_others = read_command(command).launcher or script or shell_script(command)[0]
    if tasks == 1 or "WORLD_SIZE" in environ or starts_others or _MEETS.search(" ".join(command)):
        return ""
    return (
        f"srun started {tasks} tasks, and RANK and WORLD_SIZE are not set: a script that does not "
        "read Slurm's own variables trains alone in each task (a run file with `command:` starts "
        "them as one training)"
    )
