"""Where ranks start, which of them a process is, and where they meet.

`Start.of` says which ranks this process starts: those of its Slurm job, or some on this machine; or
that it is a rank that torchrun, mpirun or a user's own srun started. `RankInfo.of` says which rank
it is. Both read the environment's variables; `runner.launch.network` asks the machine. A rank
exports `RankInfo.variables()` before it imports torch or deepspeed. Nothing here imports torch.
"""

from __future__ import annotations

import os
import re
import socket
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from runner.from_stage import UsageError
from runner.launch import network
from runner.launch.network import Master
from runner.run_folder.heartbeat import Heartbeat
from runner.slurm.environment import (
    BINDS_GPUS,
    VARIABLES,
    SlurmJobEnvironment,
    SlurmStep,
    host_names,
    master_port,
    read_number,
    tasks_per_node,
)
from runner.slurm.jobs import over_job

RANK_FLAG = "AIRLIFT_RANK"
"""Set to 1 in every rank that Airlift starts."""

MEETING_FILE = "AIRLIFT_MEETING_FILE"
"""The file of torch's FileStore, by which ranks on one machine find each other.

torch's TCP store would ask DNS for the name of 127.0.0.1.
"""

TORCH_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""All five must be set, or DeepSpeed looks for MPI."""

OURS, BY_HAND = "runner", "variables of this shell"
"""Who started a rank, beside torchrun, srun and the names in `MPI_VARIABLES`."""

MPI_VARIABLES = (
    # name, rank, ranks, rank on this node, ranks on this node
    (
        "Open MPI",
        *(f"OMPI_COMM_WORLD_{part}" for part in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    ),
    (
        "MVAPICH2",
        *(f"MV2_COMM_WORLD_{part}" for part in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    ),
    ("Cray PALS", "PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
    ("MPICH or Intel MPI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
HOST_FILES = ("PBS_NODEFILE", "LSB_DJOB_HOSTFILE", "PE_HOSTFILE")
"""Where PBS, LSF and SGE name the hosts of a job; the first word of a line is a host."""


@dataclass(frozen=True)
class Start:
    """Which ranks a launcher starts.

    Attributes:
        on_node: the number of ranks on each node.
        job: the Slurm job, whose ranks srun starts on all its nodes; None: ranks on this machine.
        num_nodes: the number of nodes.
    """

    on_node: int = 1
    job: SlurmJobEnvironment | None = None
    num_nodes: int = 1

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.on_node * self.num_nodes

    @staticmethod
    def in_job(environ: Mapping[str, str]) -> Start:
        """The ranks of the Slurm job of this process.

        Raises:
            UsageError: there is none, or its tasks do not divide among its nodes.
        """
        job = SlurmJobEnvironment.from_environ(environ)
        if job is None:
            raise UsageError("this is not inside a Slurm job", "Submit it with `runner submit`.")
        return Start(tasks_per_node(job), job, job.num_nodes)

    @staticmethod
    def of(environ: Mapping[str, str], processes: int | None = None) -> Start | None:
        """Which ranks this process starts; None: it is itself one that was started.

        A task of a Slurm step with several tasks is a rank. A step of one task, or a `srun --pty`
        shell, starts ranks on its own machine. The rest of an allocation (batch script, salloc
        shell) starts them with srun, unless `processes` is given.

        Args:
            processes: the user's `--processes`.

        Raises:
            UsageError: `processes` is given although this is a rank of another launcher, or Slurm
                started several tasks or allocated several nodes; this is an interactive shell on
                one of several nodes; the variables of a launcher are incomplete; or they are of a
                job that is over.
        """
        try:
            return _start(environ, processes)
        except UsageError as error:
            raise over_job(environ) or error from None

    def find_rank_0(self, environ: Mapping[str, str]) -> Master:
        """Finds where rank 0 will listen. The address is empty if only the nodes can find it.

        Raises:
            UsageError: MASTER_ADDR points to another node, or there is no address.
        """
        hosts = host_names(self.job.nodes) if self.job else []
        if self.num_nodes > 1 and environ.get(VARIABLES["node_rank"]) != "0":  # an salloc shell
            return Master("", "the ranks find its address")
        return network.locate(environ.get("MASTER_ADDR", ""), hosts, self.num_nodes, is_first=True)


def as_launcher(start: Start | None, command: str) -> Start:
    """Which ranks a command starts that cannot be a rank itself.

    Raises:
        UsageError: this process was started as a rank.
    """
    if start is None:
        raise UsageError(
            f"runner {command} starts its ranks itself.", "Call it once, without srun or torchrun."
        )
    return start


def _start(environ: Mapping[str, str], processes: int | None) -> Start | None:
    if environ.get(RANK_FLAG) == "1":
        return None
    if all(name in environ for name in TORCH_VARIABLES):
        if processes is not None:
            raise UsageError(
                f"--processes {processes} starts ranks, but {', '.join(TORCH_VARIABLES)} say that "
                f"this is rank {environ['RANK']} of {environ['WORLD_SIZE']}",
                f"Left from a trial in this shell? unset {' '.join(TORCH_VARIABLES)}; under a "
                "launcher such as torchrun, omit --processes.",
            )
        return None
    # Before Slurm: inside a job mpirun starts its helpers with srun, and the ranks inherit their
    # variables.
    task = _mpi_task(environ)
    if task is not None and task.world_size > 1:
        started = f"mpirun has already started {task.world_size} processes"
        _check_no_processes(processes, started, "mpirun")
        return None
    here = Start(processes or 1)
    job = SlurmJobEnvironment.from_environ(environ)
    if job is None:
        _check_alone(environ, started_alone=task is not None)
        return here
    step = job.step
    if step is None:
        if processes is None:
            return Start(tasks_per_node(job), job, job.num_nodes)
        if job.num_nodes > 1:
            raise UsageError(
                f"--processes {processes} starts ranks on one machine, but this job has "
                f"{job.num_nodes} nodes",
                "Omit --processes: inside a job, srun starts the ranks on all nodes.",
            )
        return here
    if step.world_size == 1:
        return here
    if not job.interactive:
        _check_no_processes(processes, f"srun has already started {step.world_size} tasks", "srun")
        return None
    if len(step.tasks_per_node) > 1:
        raise UsageError(
            f"this shell is one of {step.world_size} tasks on {len(step.tasks_per_node)} nodes; "
            "from here only this node can be used",
            "Use `salloc` with the same options instead of `srun --pty`, then run it again.",
        )
    return here


def _check_no_processes(processes: int | None, started: str, by: str) -> None:
    if processes is not None:
        raise UsageError(
            f"--processes {processes} starts ranks, but {started}",
            f"Omit --processes, or run it without {by}.",
        )


def _check_alone(environ: Mapping[str, str], *, started_alone: bool) -> None:
    """Checks that no other launcher started this process, and that its job has no other node.

    Args:
        started_alone: an MPI launcher started this process and no other.

    Raises:
        UsageError: the variables of another launcher are incomplete, or the job has more nodes than
            this process could use. The remedy says what to write.
    """
    given = [name for name in TORCH_VARIABLES if name in environ]
    if {"RANK", "WORLD_SIZE"} <= set(given) and environ["WORLD_SIZE"] != "1":
        missing = [name for name in TORCH_VARIABLES if name not in environ]
        raise UsageError(
            f"this process is rank {environ['RANK']} of {environ['WORLD_SIZE']} (RANK, "
            f"WORLD_SIZE), but {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set",
            f"export {' '.join(f'{name}=...' for name in missing)} for each rank, or start the "
            "ranks with torchrun; to train on this machine alone: unset RANK WORLD_SIZE.",
        )
    for rank, size in (*(names[:2] for _, *names in MPI_VARIABLES), ("PMIX_RANK", "")):
        if rank in environ and environ.get(size) != "1" and not started_alone:
            raise UsageError(
                f"an MPI launcher started this process ({rank}={environ[rank]}), and its variables "
                "do not say which of the processes on this node it is",
                "Give each rank RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, or use "
                "torchrun.",
            )
    hosts = _hosts_of_other_jobs(environ)
    if len(hosts) > 1:
        names = ", ".join(hosts[:4]) + (", ..." if len(hosts) > 4 else "")
        raise UsageError(
            f"this job has {len(hosts)} nodes ({names}); started like this, runner would use this "
            "one alone",
            "Start one process for each rank: mpirun -np RANKS runner train RUN --bundle BUNDLE.",
        )


def _hosts_of_other_jobs(environ: Mapping[str, str]) -> list[str]:
    """The hosts that a job of PBS, LSF or SGE names, where this node can read them."""
    hosts = environ.get("LSB_MCPU_HOSTS", "").split()[::2]  # each with its number of slots
    for path in filter(None, map(environ.get, HOST_FILES)):
        with suppress(OSError, ValueError):
            lines = Path(path).read_text(encoding="utf-8").splitlines()
            hosts += [line.split()[0] for line in lines if line.strip()]
    return list(dict.fromkeys(hosts))


@dataclass(frozen=True)
class RankNumbers:
    """The numbers of a rank, by torch's names."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


def rank_numbers(environ: Mapping[str, str]) -> RankNumbers:
    """Reads this rank's numbers: from Airlift's or torchrun's variables, mpirun's, or Slurm's.

    Returns:
        A `LaunchedProcess` where they are mpirun's or Slurm's.

    Raises:
        UsageError: a variable is missing, or not a number.
    """
    if all(name in environ for name in TORCH_VARIABLES):
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        whole = {"LOCAL_WORLD_SIZE": environ["WORLD_SIZE"], **environ}
        return RankNumbers(*(read_number(whole, name) for name in names))
    task = task_of(environ)
    if task is None:
        missing = ", ".join(name for name in TORCH_VARIABLES if name not in environ)
        raise UsageError(
            f"this process should be a rank, but {missing} are not set",
            f"unset {RANK_FLAG}, then start it with `runner train`.",
        )
    return task


@dataclass(frozen=True, kw_only=True)
class RankInfo(RankNumbers):
    """The number of this rank, the number of ranks, and where rank 0 listens.

    Attributes:
        master: the address of rank 0.
        port: its TCP port.
        started_by: who started this rank: `OURS`, `BY_HAND`, or the launcher's name.
        notes: lines for people on the choice of that address.
        peers: the known names of the job's other hosts.
    """

    master: str
    port: int
    started_by: str = OURS
    notes: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()

    @staticmethod
    def of(environ: Mapping[str, str]) -> RankInfo:
        """Reads this rank's numbers, and finds rank 0.

        Raises:
            UsageError: a variable is missing or contradicts another, or rank 0's address is
                unknown.
        """
        numbers = rank_numbers(environ)
        if isinstance(numbers, LaunchedProcess):
            info = _of_task(numbers, environ)
        else:
            info = _of_torch(numbers, environ)
        if not (
            0 <= info.rank < info.world_size
            and 0 <= info.local_rank < info.local_world_size <= info.world_size
        ):
            raise UsageError(
                f"these rank variables contradict each other: {info.variables()}",
                "Start the ranks with srun, mpirun or torchrun, in a shell without these "
                "variables.",
            )
        return info

    @property
    def is_ours(self) -> bool:
        """Whether our own launcher started this rank, and watches it."""
        return self.started_by == OURS

    @property
    def on_one_node(self) -> bool:
        """Whether all ranks are on this node."""
        return self.local_world_size == self.world_size

    def variables(self) -> dict[str, str]:
        """The environment variables that torch.distributed and DeepSpeed read."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "MASTER_ADDR": self.master,
            "MASTER_PORT": str(self.port),
        }

    def network_variables(self, environ: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
        """The variables of gloo and NCCL to set before torch is imported, and lines with reasons.

        Without them gloo offers the others the address of this node's own name, which may be
        useless (Debian: 127.0.1.1). Variables that the user set win.
        """
        is_known = "LOCAL_WORLD_SIZE" in environ  # else it was taken to be all ranks
        on_one_node = self.world_size == 1 or (self.on_one_node and is_known)
        if on_one_node or network.is_loopback(self.master):
            return network.loopback_variables(environ, [name for _, name in socket.if_nameindex()])
        return network.interface_variables(environ, self.master, self.peers)


@dataclass(frozen=True)
class Rank:
    """This process, a rank.

    Attributes:
        heartbeat: shows in the run folder that it is alive.
    """

    info: RankInfo
    heartbeat: Heartbeat


def variables_between_nodes(environ: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """The variables with which a user's script finds its ranks; on one node MASTER_ADDR alone.

    The same as for our own ranks. A MASTER_ADDR that others can reach is not changed. It never
    raises, because the script may not need them: an error becomes a line.

    Returns:
        The variables to set, and lines with the reasons.
    """
    given = environ.get("MASTER_ADDR", "")
    try:
        job = SlurmJobEnvironment.from_environ(environ)
        if job is not None and job.num_nodes == 1 and not given:
            return {"MASTER_ADDR": "127.0.0.1"}, []
        task = task_of(environ)
        if task is None or task.num_nodes == 1:
            return {}, []
        master = task.locate_rank_0(given)
    except UsageError as error:
        return {}, [error.message]
    variables, lines = network.interface_variables(
        environ, master.address, network.other_hosts(task.hosts, environ)
    )
    if master.address != given:
        variables["MASTER_ADDR"] = master.address
        lines = [
            *([master.ignored] if master.ignored else []),
            f"MASTER_ADDR={master.address}: {master.reason}",
            *lines,
        ]
    return variables, lines


@dataclass(frozen=True, kw_only=True)
class LaunchedProcess(RankNumbers):
    """A process that MPI's launcher or srun started as a rank.

    Attributes:
        hosts: of the job, rank 0's first; empty: not known.
        num_nodes: 2 stands for several, which variables of MPI do not count.
        host: this node's name for the scheduler.
        on_first_host: whether it is the first of `hosts`.
        port: where rank 0 listens, unless MASTER_PORT is set.
        step: the step of srun; None: of MPI.
    """

    launcher: str
    hosts: Sequence[str]
    num_nodes: int
    host: str
    on_first_host: bool
    port: int
    step: SlurmStep | None = None

    def locate_rank_0(self, given: str) -> Master:
        """Finds where rank 0 listens; `given` is MASTER_ADDR.

        Raises:
            UsageError: it is not known. The remedy says what to write.
        """
        remedy = network.UNSET
        if not self.hosts:
            forward = " and give mpirun -x MASTER_ADDR" if self.launcher == "Open MPI" else ""
            remedy = (
                f"Write before mpirun: export MASTER_ADDR=FIRST_HOST{forward}. The first host is "
                "the first word of $PBS_NODEFILE, $PE_HOSTFILE (files) or $LSB_MCPU_HOSTS."
            )
        if self.num_nodes > 1 and not given and not self.hosts:
            raise UsageError(
                f"rank {self.rank} of {self.launcher} does not know where rank 0 is: "
                "MASTER_ADDR is not set",
                remedy,
            )
        is_elsewhere = self.rank == 0 and bool(self.hosts) and not self.on_first_host
        if self.num_nodes > 1 and not given and is_elsewhere:
            raise UsageError(
                f"rank 0 runs on {self.host}, not on {self.hosts[0]}, the job's first host",
                "Set MASTER_ADDR to the host of rank 0, for all ranks.",
            )
        is_first = self.rank == 0 or self.on_first_host
        return network.locate(given, self.hosts, self.num_nodes, is_first=is_first, remedy=remedy)


def task_of(environ: Mapping[str, str]) -> LaunchedProcess | None:
    """The task of MPI's launcher or of srun that this process is; None: neither started it.

    Raises:
        UsageError: a variable of theirs is not a number, or missing.
    """
    task = _mpi_task(environ) if environ.get(RANK_FLAG) != "1" else None
    job = SlurmJobEnvironment.from_environ(environ) if task is None else None
    if job is None or job.step is None:
        return task
    step = job.step
    return LaunchedProcess(
        launcher="srun",
        rank=step.rank,
        world_size=step.world_size,
        local_rank=step.local_rank,
        local_world_size=step.tasks_per_node[step.node_rank],
        hosts=host_names(step.nodes),
        num_nodes=len(step.tasks_per_node),
        host=network.this_host(environ),
        on_first_host=step.node_rank == 0,
        port=master_port(job.job_id, step.step_id),
        step=step,
    )


def _mpi_task(environ: Mapping[str, str]) -> LaunchedProcess | None:
    """Reads the variables of an MPI launcher; None if it set none or not all of them."""
    for launcher, *names in MPI_VARIABLES:
        if all(environ.get(name) for name in names):
            numbers = RankNumbers(*(read_number(environ, name) for name in names))
            hosts, host = _hosts_in_slurm(environ), network.this_host(environ)
            return LaunchedProcess(
                launcher=launcher,
                **vars(numbers),
                hosts=hosts,
                num_nodes=1 if numbers.local_world_size == numbers.world_size else 2,
                host=host,
                on_first_host=bool(hosts) and network.same_host(hosts[0], host),
                port=master_port(_job_number(environ), 0),
            )
    return None


def _job_number(environ: Mapping[str, str]) -> int:
    """A number that is equal in all ranks of MPI, and rarely equal in other jobs on the node."""
    text = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid") or ""
    if match := re.match(r"\d+", text):
        return int(match[0])
    return zlib.crc32(text.encode()) if text else os.getuid()


def _hosts_in_slurm(environ: Mapping[str, str]) -> list[str]:
    """The hosts of the job; empty outside of Slurm, where MASTER_ADDR must say where rank 0 is."""
    nodes = environ.get(VARIABLES["job_nodes"])
    return host_names(nodes) if nodes else []


def _of_torch(numbers: RankNumbers, environ: Mapping[str, str]) -> RankInfo:
    started_by = BY_HAND
    if environ.get(RANK_FLAG) == "1":
        started_by = OURS
    elif "TORCHELASTIC_RUN_ID" in environ or VARIABLES["step_id"] in environ:
        started_by = "torchrun or srun"
    return RankInfo(
        **vars(numbers),
        master=environ["MASTER_ADDR"],
        port=_port(environ["MASTER_PORT"]),
        started_by=started_by,
        peers=tuple(network.other_hosts(_hosts_in_slurm(environ), environ)),
    )


def _of_task(task: LaunchedProcess, environ: Mapping[str, str]) -> RankInfo:
    if task.step is not None:
        _check_spread(task.step)
    master = task.locate_rank_0(environ.get("MASTER_ADDR", ""))
    is_ours = environ.get(RANK_FLAG) == "1"
    where = f"rank 0 listens on {master.address}: {master.reason}"
    notes: tuple[str, ...]
    if task.step is None:
        notes = (f"ranks started by {task.launcher}", master.ignored, where)
    elif is_ours and "MASTER_ADDR" in environ:
        notes = ()  # the launcher has printed it
    else:
        notes = (master.ignored, where, _note_on_binding(environ))
    return RankInfo(
        rank=task.rank,
        world_size=task.world_size,
        local_rank=task.local_rank,
        local_world_size=task.local_world_size,
        master=master.address,
        port=_port(environ.get("MASTER_PORT") or str(task.port)),
        started_by=OURS if is_ours else task.launcher,
        notes=tuple(filter(None, notes)),
        peers=tuple(network.other_hosts(task.hosts, environ)),
    )


def _check_spread(step: SlurmStep) -> None:
    """Checks that as many ranks are on each node, and rank 0 where the others look for it."""
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


def _note_on_binding(environ: Mapping[str, str]) -> str:
    """A line for a user's own srun that lets each rank see its own GPU alone; else empty."""
    bound = next((name for name in BINDS_GPUS if "gpu" in name.lower() and environ.get(name)), "")
    if not bound or environ.get("SLURM_GPU_BIND"):
        return ""
    option = bound.removeprefix("SLURM_").lower().replace("_", "-")
    return (
        f"srun --{option} shows each rank its own GPU alone, which slows NCCL between them down; "
        "give sbatch and srun --gres=gpu:N instead (N GPUs per node)"
    )


def _port(text: str) -> int:
    """The number of MASTER_PORT.

    Raises:
        UsageError: it is not a port number.
    """
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 65536):
        raise UsageError(
            f"MASTER_PORT={text!r} is not a port number (1 to 65535)",
            "For all ranks: export MASTER_PORT=29500   (of torchrun: --master-port=29500)",
        )
    return int(text)
