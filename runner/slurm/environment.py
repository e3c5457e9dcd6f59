"""Reads Slurm's variables from the environment. Pure: no command is run here.

`VARIABLES` is the one table of Slurm variables. `SlurmJobEnvironment.from_environ` turns them into
values, and small functions derive what the ranks need (hosts, master port, the srun command).
`runner.slurm.script` does the opposite: it turns a request into an sbatch script.

Observed on Slurm 22.05: the batch script has SLURM_PROCID=0 but no SLURM_STEP_ID (newer versions
put a reserved number there); a shell from salloc has neither; a task of srun has both. A job that
was submitted from inside another job's step inherits that step's SLURM_STEP_* and SLURM_PTY_PORT.

sbatch reads options from variables too, and they win over the lines of the script (sbatch(1),
"INPUT ENVIRONMENT VARIABLES"). Those that contradict a line are not handed to it. All others stay:
many people set SBATCH_ACCOUNT for all of their jobs.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from runner.from_stage import UsageError

_RESTART = "Start it with sbatch or srun, in a shell that did not set this variable by hand."

VARIABLES = {
    "job_id": "SLURM_JOB_ID",
    "job_num_nodes": "SLURM_JOB_NUM_NODES",
    "job_nodes": "SLURM_JOB_NODELIST",
    "job_tasks": "SLURM_NTASKS",
    "job_tasks_per_node": "SLURM_NTASKS_PER_NODE",
    "cpus_per_task": "SLURM_CPUS_PER_TASK",
    "gpus_on_node": "SLURM_GPUS_ON_NODE",
    "restart_count": "SLURM_RESTART_COUNT",
    "step_id": "SLURM_STEP_ID",
    "step_nodes": "SLURM_STEP_NODELIST",
    "step_num_nodes": "SLURM_STEP_NUM_NODES",
    "step_tasks": "SLURM_STEP_NUM_TASKS",
    "step_tasks_per_node": "SLURM_STEP_TASKS_PER_NODE",
    "rank": "SLURM_PROCID",
    "local_rank": "SLURM_LOCALID",
    "node_rank": "SLURM_NODEID",
    "pty_port": "SLURM_PTY_PORT",
}

BINDS_GPUS = ("SLURM_GPUS_PER_TASK", "SLURM_NTASKS_PER_GPU", "SLURM_TRES_PER_TASK")
"""Variables with which srun binds each task to its own GPUs (srun(1), --gpus-per-task).

With device cgroups NCCL cannot reach the GPUs of the other tasks then, and copies through the
host's memory. Observed on Slurm 22.05.8: without these variables each task sees all GPUs that the
job has on its node. `--gpu-bind=none` would leave CUDA_VISIBLE_DEVICES unset, so that a task sees
the GPUs of other jobs too where no cgroup hides them.
"""

FIRST_RESERVED_STEP = 0xFFFFFFF0
"""Step ids from here on are not of srun: batch script, interactive shell, external (`slurm.h`)."""

EPHEMERAL_PORTS = (32768, 60999)
"""Linux's default `net.ipv4.ip_local_port_range`: the ports of outgoing connections."""


@dataclass(frozen=True, kw_only=True)
class SlurmStep:
    """One task of a step that srun started.

    Attributes:
        tasks_per_node: the number of tasks on each node.
        nodes: Slurm's host list.
    """

    step_id: int
    rank: int
    world_size: int
    local_rank: int
    node_rank: int
    tasks_per_node: tuple[int, ...]
    nodes: str


@dataclass(frozen=True, kw_only=True)
class SlurmJobEnvironment:
    """The Slurm job around this process; `step` is set if this process is a task of srun."""

    job_id: int
    nodes: str
    num_nodes: int
    tasks: int | None
    tasks_per_node: int | None
    cpus_per_task: int | None
    gpus_on_node: int | None
    restart_count: int
    interactive: bool
    step: SlurmStep | None

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> SlurmJobEnvironment | None:
        """Reads the Slurm variables; None outside a job.

        Raises:
            UsageError: a variable that Slurm always sets is missing or not a number.
        """
        if VARIABLES["job_id"] not in environ:
            return None
        step = _step(environ)
        return cls(
            job_id=_number(environ, "job_id"),
            nodes=_text(environ, "job_nodes"),
            num_nodes=_number(environ, "job_num_nodes"),
            tasks=_optional_number(environ, "job_tasks"),
            tasks_per_node=_optional_number(environ, "job_tasks_per_node"),
            cpus_per_task=_optional_number(environ, "cpus_per_task"),
            gpus_on_node=_optional_number(environ, "gpus_on_node"),
            restart_count=_optional_number(environ, "restart_count") or 0,
            interactive=step is not None and VARIABLES["pty_port"] in environ,
            step=step,
        )


def _step(environ: Mapping[str, str]) -> SlurmStep | None:
    step_id = _optional_number(environ, "step_id")
    if step_id is None or step_id >= FIRST_RESERVED_STEP:
        return None
    if _number(environ, "step_tasks") != _optional_number(environ, "job_tasks"):
        # srun sets both to the same number: these are of the step in which this job was submitted.
        return None
    return SlurmStep(
        step_id=step_id,
        rank=_number(environ, "rank"),
        world_size=_number(environ, "step_tasks"),
        local_rank=_number(environ, "local_rank"),
        node_rank=_number(environ, "node_rank"),
        tasks_per_node=task_counts(_text(environ, "step_tasks_per_node")),
        nodes=_text(environ, "step_nodes"),
    )


def task_counts(text: str) -> tuple[int, ...]:
    """Reads Slurm's tasks-per-node notation, one count per node: `2(x3),1` is `(2, 2, 2, 1)`.

    Raises:
        UsageError: the text is not in this notation.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if not match:
            raise UsageError(
                f"{VARIABLES['step_tasks_per_node']}={text!r} is not a list of task counts",
                _RESTART,
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return tuple(counts)


def host_names(nodes: str) -> list[str]:
    """Reads a Slurm host list: `gpu[007-008,12],login` is gpu007, gpu008, gpu12, login.

    Rank 0 runs on the first host.

    Raises:
        UsageError: the text is not such a list.
    """
    names = [name for part in re.split(r",(?![^\[]*\])", nodes) for name in _expanded(part)]
    for name in names:
        if not re.fullmatch(r"[A-Za-z0-9._-]+", name):
            raise UsageError(f"the host list {nodes!r} is not one of Slurm's", _RESTART)
    return names


def _expanded(part: str) -> list[str]:
    """Expands one entry, which may have several brackets: `r[1-2]n[07,9]`."""
    match = re.search(r"\[([^\[\]]*)\]", part)
    if not match:
        return [part]
    numbers: list[str] = []
    for entry in match[1].split(","):
        low, dash, high = entry.partition("-")
        if not low.isdecimal() or not (high.isdecimal() or not dash):
            return [part]
        numbers += [str(n).zfill(len(low)) for n in range(int(low), int(high or low) + 1)]
    return [
        name for n in numbers for name in _expanded(part[: match.start()] + n + part[match.end() :])
    ]


def master_port(job_id: int, step_id: int, ephemeral: tuple[int, int] = EPHEMERAL_PORTS) -> int:
    """A TCP port that all ranks compute alike, and other jobs on the node probably do not.

    Consecutive jobs get consecutive ports. The range is outside `ephemeral` (first, last), so no
    outgoing connection holds the port. If the site made nearly all ports ephemeral, the range is
    20000 to 29999.
    """
    low, high = ephemeral
    below, above = range(10000, min(low, 32768)), range(max(high + 1, 10000), 65536)
    window = max(below, above, key=len)
    if len(window) < 1000:
        window = range(20000, 30000)
    return window[(job_id + 1009 * step_id) % len(window)]


def _text(environ: Mapping[str, str], name: str) -> str:
    value = environ.get(VARIABLES[name])
    if not value:
        raise UsageError(
            f"{VARIABLES[name]} is not set, although {VARIABLES['job_id']} is",
            "Start it with sbatch or srun; a shell that copied only some Slurm variables cannot "
            "start ranks.",
        )
    return value


def _number(environ: Mapping[str, str], name: str) -> int:
    return read_number({VARIABLES[name]: _text(environ, name)}, VARIABLES[name])


def read_number(environ: Mapping[str, str], variable: str) -> int:
    """The value of a variable that holds a number, without a sign.

    Raises:
        UsageError: it is not a number.
    """
    text = environ[variable]
    if not text.isascii() or not text.isdigit():
        raise UsageError(f"{variable}={text!r} is not a number", _RESTART)
    return int(text)


def _optional_number(environ: Mapping[str, str], name: str) -> int | None:
    return _number(environ, name) if environ.get(VARIABLES[name]) else None


def tasks_per_node(job: SlurmJobEnvironment) -> int:
    """The number of ranks on each node, as the job requested.

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
    """The CPUs of one rank: as requested, else its share of the job's CPUs on the smallest node."""
    if job.cpus_per_task:
        return job.cpus_per_task
    cpus = environ.get("SLURM_JOB_CPUS_PER_NODE")
    return max(1, min(task_counts(cpus)) // tasks_per_node(job)) if cpus else 1


def srun_command(
    job: SlurmJobEnvironment, environ: Mapping[str, str], on_node: int, words: Sequence[str]
) -> list[str]:
    """The srun command that starts a program on all nodes, with all CPUs of the job. Pure.

    Args:
        on_node: how often on each node.
        words: further options of srun, then the program and its arguments.
    """
    return [
        "srun",
        # Without these options srun may place 3 + 1 tasks, and since 22.05 it ignores the job's
        # --cpus-per-task.
        f"--nodes={job.num_nodes}",
        f"--ntasks={job.num_nodes * on_node}",
        f"--ntasks-per-node={on_node}",
        f"--cpus-per-task={cpus_per_task(job, environ) * tasks_per_node(job) // on_node}",
        "--mpi=none",  # ranks meet through MASTER_ADDR; a site's default MPI plugin can only fail
        "--export=ALL",  # else sbatch --export=NONE removes PATH from the tasks
        "--input=none",
        *words,
    ]


PREFIX = "SBATCH_"
OF_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
"""The batch script unsets them: left from a trial by hand, they would make it a rank."""

_OF_IMAGE = [name for name in OF_RANKS if name != "MASTER_ADDR"]
WITHOUT_RANKS = ("env", *(word for name in _OF_IMAGE for word in ("-u", name)))
"""The first words of what srun starts in a container: images may set variables of ranks."""

OF_GPUS = ("GRES", "GPUS", "GPUS_PER_NODE", "GPUS_PER_TASK", "GPUS_PER_SOCKET")
OF_MEMORY = ("MEM_PER_NODE", "MEM_PER_CPU", "MEM_PER_GPU")
"""Variables for options of sbatch, without `SBATCH_`."""
_NAMES: Mapping[str, tuple[str, ...]] = {
    "time": ("TIMELIMIT",),
    "array": ("ARRAY_INX",),
    "requeue": ("REQUEUE", "NO_REQUEUE"),
    **dict.fromkeys(("gres", "gpus", "gpus-per-node", "gpus-per-task"), OF_GPUS),
    **dict.fromkeys(("mem", "mem-per-cpu", "mem-per-gpu"), OF_MEMORY),
}
"""Option -> its variables, where they have other names."""
_NEVER = ("ARRAY_INX", "WAIT", "TEST_ONLY")
"""A copy of the job for each index; an sbatch that waits for the end of the job."""
_LINE = re.compile(r"#SBATCH --([a-z0-9-]+)(?:=(.*))?")


def overriding(script: str, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that would change what a script asks for.

    Returns:
        Variable -> the option of the script that counts; empty: it has none.
    """
    found = {f"{PREFIX}{name}": "" for name in _NEVER if f"{PREFIX}{name}" in environ}
    for line in script.splitlines():
        if line and not line.startswith("#"):
            break  # sbatch reads no options after the first command
        if not (match := _LINE.fullmatch(line)):
            continue
        value = "".join(shlex.split(match[2] or ""))
        for name in _NAMES.get(match[1], (match[1].upper().replace("-", "_"),)):
            theirs = environ.get(f"{PREFIX}{name}")
            if theirs is not None and theirs != value:
                found[f"{PREFIX}{name}"] = f"--{match[1]}{f'={value}' if value else ''}"
    return found


def notes_on_variables(script: str, environ: Mapping[str, str]) -> list[str]:
    """Lines on the variables of this shell that a job does not get, and on options that it does."""
    dropped = overriding(script, environ)
    lines = [
        f"{name}={environ[name]} of this shell is not used"
        + (f": the job asks for {option}" if option else "")
        for name, option in dropped.items()
    ]
    kept = {n: v for n, v in environ.items() if n.startswith(PREFIX) and n not in dropped}
    if kept:
        listed = ", ".join(f"{name}={value}" for name, value in sorted(kept.items()))
        lines.append(f"options of the job from this shell: {listed}")
    if ranks := [name for name in OF_RANKS if name in environ]:
        lines.append(f"the job does not get {', '.join(ranks)} of this shell: srun sets them")
    return lines
