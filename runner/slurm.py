"""What Slurm tells a process about itself, read from the environment. Pure: no command is run here.

`VARIABLES` is the one table of Slurm variables; `SlurmJobEnvironment.from_environ` turns them into values, and
small functions derive what the ranks need (first host, master port). The other direction, a request turned
into an sbatch script, is `runner.sbatch`.

Observed on Slurm 22.05: the batch script has SLURM_PROCID=0 but no SLURM_STEP_ID (newer versions put a reserved
number there); a shell from salloc has neither; a task started by srun has both. A job that was submitted from
inside another job's step inherits that step's SLURM_STEP_* and SLURM_PTY_PORT.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from runner.errors import UsageError

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

FIRST_RESERVED_STEP = 0xFFFFFFF0
"""Step ids from here on are not srun's: batch script, interactive shell, external (`slurm.h`)."""

EPHEMERAL_PORTS = (32768, 60999)
"""Linux's default `net.ipv4.ip_local_port_range`, from which outgoing connections take their ports."""


@dataclass(frozen=True, kw_only=True)
class SlurmStep:
    """One task of a step that srun started: everything a rank is."""

    step_id: int
    rank: int
    world_size: int
    local_rank: int
    node_rank: int
    tasks_per_node: tuple[int, ...]
    nodes: str


@dataclass(frozen=True, kw_only=True)
class SlurmJobEnvironment:
    """The Slurm job around this process; `step` only where this process is a task of a srun step."""

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
            UsageError: a variable that Slurm always sets in such a place is missing or no number.
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
        # srun sets both to the same number: these are leftovers of the step in which this job was submitted.
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
    """Slurm's tasks-per-node notation, one count a node: `2(x3),1` is `(2, 2, 2, 1)`."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if not match:
            raise UsageError(f"{VARIABLES['step_tasks_per_node']}={text!r} is not a list of task counts")
        counts += [int(match[1])] * int(match[2] or 1)
    return tuple(counts)


def first_host(nodes: str) -> str:
    """The first host of a Slurm host list: `gpu[007-009,12],login` is `gpu007`. That is where rank 0 runs."""
    host = re.sub(r"\[(\w+)[^\]]*\]", r"\1", re.split(r",(?![^\[]*\])", nodes)[0])
    if not re.fullmatch(r"[A-Za-z0-9._-]+", host):
        raise UsageError(f"the host list {nodes!r} names no first host")
    return host


def master_port(job_id: int, step_id: int, ephemeral: tuple[int, int] = EPHEMERAL_PORTS) -> int:
    """A port every rank computes alike and no other job on the node is likely to compute.

    Consecutive jobs get consecutive ports. The range lies outside `ephemeral` (first, last), so no outgoing
    connection holds the port already; where the site opened everything to those, a range seldom reached is used.
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
            "Start it with sbatch or srun; a shell that copied only some Slurm variables cannot start ranks.",
        )
    return value


def _number(environ: Mapping[str, str], name: str) -> int:
    text = _text(environ, name)
    if not text.isascii() or not text.isdigit():
        raise UsageError(f"{VARIABLES[name]}={text!r} is not a number")
    return int(text)


def _optional_number(environ: Mapping[str, str], name: str) -> int | None:
    return _number(environ, name) if environ.get(VARIABLES[name]) else None
