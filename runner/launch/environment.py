"""What this process is, a launcher or a rank, and the variables and command of a rank.

`role` says whether this process is a rank, the launcher of a Slurm job, or the launcher on one
machine. A launcher calls `start_ranks` (`runner.launch.start`). A rank calls `rank_environment` and
exports `RankEnvironment.variables()` before it imports torch or deepspeed. Nothing here imports
torch.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from runner.errors import UsageError
from runner.launch import network
from runner.launch.mpi import MpiTask, check_complete, check_knows_rank_0, job_number, mpi_task
from runner.launch.rendezvous import Master, address_in_slurm, locate
from runner.slurm.environment import (
    BINDS_GPUS,
    VARIABLES,
    SlurmJobEnvironment,
    SlurmStep,
    host_names,
    master_port,
    read_number,
)

RANK_FLAG = "AIRLIFT_RANK"
"""Set to 1 in every rank that Airlift starts."""

MEETING_FILE = "AIRLIFT_MEETING_FILE"
"""The file of torch's FileStore, by which ranks on one machine find each other.

torch's TCP store would ask DNS for the name of 127.0.0.1.
"""

STOPPED = "stopped"
"""Rank 0 writes this file to the run folder, after a barrier, when all ranks saved on a signal."""

TORCH_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""All five must be set, or DeepSpeed looks for MPI."""


Role = Literal["rank", "batch", "local"]


@dataclass(frozen=True, kw_only=True)
class RankEnvironment:
    """The number of this rank, the number of ranks, and where rank 0 listens.

    Attributes:
        notes: lines for people on the choice of that address.
        peers: the known names of the job's other hosts.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int
    notes: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()

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
    """Whether this process is a rank, launches ranks with srun ("batch"), or launches them itself.

    A task of a Slurm step with several tasks is a rank. A step of one task, or a `srun --pty`
    shell, launches on its own machine ("local"). The rest of an allocation (batch script, salloc
    shell) launches with srun, unless `processes` is given.

    Args:
        processes: the user's `--processes`.

    Raises:
        UsageError: `processes` is given although this is a rank of another launcher, or Slurm
            started several tasks or allocated several nodes; or this is an interactive shell on one
            of several nodes.
    """
    if environ.get(RANK_FLAG) == "1":
        return "rank"
    if all(name in environ for name in TORCH_VARIABLES):
        if processes is not None:
            raise UsageError(
                f"--processes {processes} starts ranks, but {', '.join(TORCH_VARIABLES)} say that "
                f"this is rank {environ['RANK']} of {environ['WORLD_SIZE']}",
                f"Left from a trial in this shell? unset {' '.join(TORCH_VARIABLES)}; under a "
                "launcher such as torchrun, omit --processes.",
            )
        return "rank"
    # Before Slurm: inside a job mpirun starts its helpers with srun, and the ranks inherit their
    # variables.
    task = mpi_task(environ)
    if task is not None and task.world_size > 1:
        _check_no_processes(
            processes, f"mpirun has already started {task.world_size} processes", "mpirun"
        )
        return "rank"
    job = SlurmJobEnvironment.from_environ(environ)
    if job is None:
        check_complete(environ, TORCH_VARIABLES, started_alone=task is not None)
        return "local"
    step = job.step
    if step is None:
        if processes is None:
            return "batch"
        if job.num_nodes > 1:
            raise UsageError(
                f"--processes {processes} starts ranks on one machine, but this job has "
                f"{job.num_nodes} nodes",
                "Omit --processes: inside a job, srun starts the ranks on all nodes.",
            )
        return "local"
    if step.world_size == 1:
        return "local"
    if not job.interactive:
        _check_no_processes(processes, f"srun has already started {step.world_size} tasks", "srun")
        return "rank"
    if len(step.tasks_per_node) > 1:
        raise UsageError(
            f"this shell is one of {step.world_size} tasks on {len(step.tasks_per_node)} nodes; "
            "from here only this node can be used",
            "Use `salloc` with the same options instead of `srun --pty`, then run it again.",
        )
    return "local"


def _check_no_processes(processes: int | None, started: str, by: str) -> None:
    if processes is not None:
        raise UsageError(
            f"--processes {processes} starts ranks, but {started}",
            f"Omit --processes, or run it without {by}.",
        )


def rank_environment(environ: Mapping[str, str]) -> RankEnvironment:
    """Reads this rank's numbers: from Airlift's or torchrun's variables, mpirun's, or Slurm's.

    Raises:
        UsageError: a variable is missing or contradicts another, or rank 0's address is unknown.
    """
    if all(name in environ for name in TORCH_VARIABLES):
        return _checked(
            RankEnvironment(
                rank=read_number(environ, "RANK"),
                world_size=read_number(environ, "WORLD_SIZE"),
                local_rank=read_number(environ, "LOCAL_RANK"),
                local_world_size=read_number(
                    {"LOCAL_WORLD_SIZE": environ["WORLD_SIZE"], **environ}, "LOCAL_WORLD_SIZE"
                ),
                master_addr=environ["MASTER_ADDR"],
                master_port=read_number(environ, "MASTER_PORT"),
                peers=tuple(network.other_hosts(_hosts_in_slurm(environ), environ)),
            )
        )
    task = mpi_task(environ) if environ.get(RANK_FLAG) != "1" else None
    if task is not None:
        return _checked(_place_in_mpi(task, environ))
    job = SlurmJobEnvironment.from_environ(environ)
    if job is None or job.step is None:
        missing = ", ".join(name for name in TORCH_VARIABLES if name not in environ)
        raise UsageError(
            f"this process should be a rank, but {missing} are not set",
            "Start it with `runner train`.",
        )
    return _checked(_place_in_step(job.job_id, job.step, environ))


def rank_number(environ: Mapping[str, str]) -> int | None:
    """This rank's number, even if other variables are wrong; None: it has none."""
    task = mpi_task(environ) if environ.get(RANK_FLAG) != "1" else None
    if all(name in environ for name in TORCH_VARIABLES):
        return read_number(environ, "RANK")
    if task is not None:
        return task.rank
    job = SlurmJobEnvironment.from_environ(environ)
    return job.step.rank if job is not None and job.step is not None else None


def _place_in_step(job_id: int, step: SlurmStep, environ: Mapping[str, str]) -> RankEnvironment:
    if len(set(step.tasks_per_node)) > 1:
        raise UsageError(
            f"Slurm placed the {step.world_size} ranks unevenly: {step.tasks_per_node} on the "
            f"nodes {step.nodes}",
            "Give sbatch and srun --ntasks-per-node, not only --ntasks.",
        )
    if step.rank == 0 and step.node_rank != 0:
        raise UsageError(
            f"rank 0 is not on the first node of {step.nodes}, where the other ranks look for it",
            "Omit --distribution and SLURM_HOSTFILE.",
        )
    hosts, num_nodes = host_names(step.nodes), len(step.tasks_per_node)
    master = locate(
        environ.get("MASTER_ADDR", ""),
        hosts,
        num_nodes,
        is_first=step.node_rank == 0,
        address_in_scheduler=address_in_slurm,
    )
    printed_by_launcher = environ.get(RANK_FLAG) == "1" and "MASTER_ADDR" in environ
    return RankEnvironment(
        rank=step.rank,
        world_size=step.world_size,
        local_rank=step.local_rank,
        local_world_size=step.tasks_per_node[step.node_rank],
        master_addr=master.address,
        master_port=_port(environ, master_port(job_id, step.step_id)),
        notes=() if printed_by_launcher else (*_notes(master), *_note_on_binding(environ)),
        peers=tuple(network.other_hosts(hosts, environ)),
    )


def _note_on_binding(environ: Mapping[str, str]) -> tuple[str, ...]:
    """A line for a user's own srun that lets each rank see its own GPU alone."""
    bound = next((name for name in BINDS_GPUS if "gpu" in name.lower() and environ.get(name)), "")
    if not bound or environ.get("SLURM_GPU_BIND"):
        return ()
    option = bound.removeprefix("SLURM_").lower().replace("_", "-")
    return (
        f"srun --{option} shows each rank its own GPU alone, which slows NCCL between them down; "
        "give sbatch and srun --gres=gpu:N instead (N GPUs per node)",
    )


def _place_in_mpi(task: MpiTask, environ: Mapping[str, str]) -> RankEnvironment:
    hosts = _hosts_in_slurm(environ)
    given = environ.get("MASTER_ADDR", "")
    num_nodes = _num_nodes(task)
    on_first_host = bool(hosts) and network.same_host(hosts[0], network.here(environ))
    if num_nodes > 1 and not given:
        check_knows_rank_0(task, given, hosts)
        if task.rank == 0 and not on_first_host:
            raise UsageError(
                f"rank 0 runs on {network.here(environ)}, not on {hosts[0]}, the job's first host",
                "Set MASTER_ADDR to the host of rank 0, for all ranks.",
            )
    is_first = task.rank == 0 or on_first_host
    master = locate(
        given, hosts, num_nodes, is_first=is_first, address_in_scheduler=address_in_slurm
    )
    return RankEnvironment(
        rank=task.rank,
        world_size=task.world_size,
        local_rank=task.local_rank,
        local_world_size=task.local_world_size,
        master_addr=master.address,
        master_port=_port(environ, master_port(job_number(environ), 0)),
        notes=(f"ranks started by {task.launcher}", *_notes(master)),
        peers=tuple(network.other_hosts(hosts, environ)),
    )


def _num_nodes(task: MpiTask) -> int:
    """The number of nodes: 1, or 2 for several, which no variable counts."""
    return 1 if task.local_world_size == task.world_size else 2


def _notes(master: Master) -> tuple[str, ...]:
    where = f"rank 0 listens on {master.address}: {master.reason}"
    return (master.ignored, where) if master.ignored else (where,)


def _hosts_in_slurm(environ: Mapping[str, str]) -> list[str]:
    """The hosts of the job; empty outside of Slurm, where MASTER_ADDR must say where rank 0 is."""
    nodes = environ.get(VARIABLES["job_nodes"])
    return host_names(nodes) if nodes else []


def _port(environ: Mapping[str, str], default: int) -> int:
    """MASTER_PORT, or `default`.

    Raises:
        UsageError: it is not a port number.
    """
    text = environ.get("MASTER_PORT") or str(default)
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 65536):
        raise UsageError(f"MASTER_PORT={text!r} is not a port number", "Unset MASTER_PORT.")
    return int(text)


def network_variables(
    place: RankEnvironment, environ: Mapping[str, str]
) -> tuple[dict[str, str], list[str]]:
    """The variables of gloo and NCCL to set before torch is imported, and lines with the reasons.

    Without them gloo offers the others the address of this node's own name, which may be useless
    (Debian: 127.0.1.1). Variables that the user set win.
    """
    on_one_node = place.local_world_size == place.world_size and "LOCAL_WORLD_SIZE" in environ
    if place.world_size == 1 or on_one_node or network.is_loopback(place.master_addr):
        return network.loopback_variables(environ, [name for _, name in socket.if_nameindex()])
    return network.interface_variables(environ, place.master_addr, place.peers)


def variables_between_nodes(environ: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """The variables with which a user's script finds its ranks on other nodes; none on one node.

    The same as for our own ranks. A MASTER_ADDR that others can reach is not changed. It never
    raises, because the script may not need them: an error becomes a line.

    Returns:
        The variables to set, and lines with the reasons.
    """
    try:
        job, task = SlurmJobEnvironment.from_environ(environ), mpi_task(environ)
        if task is not None:
            hosts, num_nodes = _hosts_in_slurm(environ), _num_nodes(task)
            is_first = task.rank == 0
        elif job is not None and job.step is not None:
            hosts, num_nodes = host_names(job.step.nodes), len(job.step.tasks_per_node)
            is_first = job.step.node_rank == 0
        else:
            return {}, []
        if num_nodes == 1:
            return {}, []
        given = environ.get("MASTER_ADDR", "")
        if task is not None:
            check_knows_rank_0(task, given, hosts)
        master = locate(
            given, hosts, num_nodes, is_first=is_first, address_in_scheduler=address_in_slurm
        )
    except UsageError as error:
        return {}, [error.message]
    variables, lines = network.interface_variables(
        environ, master.address, network.other_hosts(hosts, environ)
    )
    if master.address != given:
        variables["MASTER_ADDR"] = master.address
        lines = [
            *([master.ignored] if master.ignored else []),
            f"MASTER_ADDR={master.address}: {master.reason}",
            *lines,
        ]
    return variables, lines


def _checked(place: RankEnvironment) -> RankEnvironment:
    if not (
        0 <= place.rank < place.world_size
        and 0 <= place.local_rank < place.local_world_size <= place.world_size
    ):
        raise UsageError(
            f"these rank variables contradict each other: {place.variables()}",
            "Start the ranks with srun, mpirun or torchrun, in a shell without these variables.",
        )
    return place
