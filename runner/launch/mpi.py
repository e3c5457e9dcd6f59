"""Reads the variables of MPI launchers.

`mpi_task` is the rank that one gave this process. `check_complete` says what to write if variables
of ranks are incomplete, or if a lone process would use one of several nodes.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from runner.errors import UsageError
from runner.slurm.environment import read_number

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
class MpiTask:
    """A process that an MPI launcher started.

    Attributes:
        launcher: the launcher's name, for people.
    """

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


def mpi_task(environ: Mapping[str, str]) -> MpiTask | None:
    """Reads the variables of an MPI launcher; None if it set none or not all of them.

    Raises:
        UsageError: a variable is not a number.
    """
    for launcher, *names in MPI_VARIABLES:
        if all(environ.get(name) for name in names):
            return MpiTask(launcher, *(read_number(environ, name) for name in names))
    return None


def job_number(environ: Mapping[str, str]) -> int:
    """A number that is equal in all ranks of a job, and rarely equal in other jobs on the node."""
    text = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid") or ""
    if match := re.match(r"\d+", text):
        return int(match[0])
    return zlib.crc32(text.encode()) if text else os.getuid()


def check_knows_rank_0(task: MpiTask, given: str, hosts: Sequence[str]) -> None:
    """Checks that a rank on one of several nodes can find rank 0.

    Args:
        task: the rank.
        given: MASTER_ADDR; empty: not set.
        hosts: the job's, where they are known.

    Raises:
        UsageError: it cannot. The remedy says what to write.
    """
    if given or hosts:
        return
    forward = " and give mpirun -x MASTER_ADDR" if task.launcher == "Open MPI" else ""
    raise UsageError(
        f"rank {task.rank} of {task.launcher} does not know where rank 0 is: MASTER_ADDR is not "
        "set",
        f"Write before mpirun: export MASTER_ADDR=FIRST_HOST{forward}. The first host is the first "
        "word of $PBS_NODEFILE, $PE_HOSTFILE (files) or $LSB_MCPU_HOSTS.",
    )


def _hosts_of_job(environ: Mapping[str, str]) -> list[str]:
    """The hosts that a job of PBS, LSF or SGE names, where this node can read them."""
    hosts = environ.get("LSB_MCPU_HOSTS", "").split()[::2]  # each with its number of slots
    for path in filter(None, map(environ.get, HOST_FILES)):
        with suppress(OSError, ValueError):
            lines = Path(path).read_text(encoding="utf-8").splitlines()
            hosts += [line.split()[0] for line in lines if line.strip()]
    return list(dict.fromkeys(hosts))


def check_complete(
    environ: Mapping[str, str], torch_variables: tuple[str, ...], *, started_alone: bool = False
) -> None:
    """Checks that this process may launch ranks itself.

    Args:
        torch_variables: the names of torchrun's variables.
        started_alone: an MPI launcher started this process and no other.

    Raises:
        UsageError: another launcher started this process with incomplete variables, or the job has
            more nodes than this process could use. The remedy says what to write.
    """
    given = [name for name in torch_variables if name in environ]
    if {"RANK", "WORLD_SIZE"} <= set(given) and environ["WORLD_SIZE"] != "1":
        missing = [name for name in torch_variables if name not in environ]
        raise UsageError(
            f"this process is rank {environ['RANK']} of {environ['WORLD_SIZE']} (RANK, "
            f"WORLD_SIZE), but {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set",
            f"export {' '.join(f'{name}=...' for name in missing)} for each rank, or start the "
            "ranks with torchrun; to train on this machine alone: unset RANK WORLD_SIZE.",
        )
    for rank, size in (("PMI_RANK", "PMI_SIZE"), ("PMIX_RANK", "")):
        if rank in environ and environ.get(size) != "1" and not started_alone:
            raise UsageError(
                f"an MPI launcher started this process ({rank}={environ[rank]}), and its variables "
                "do not say which of the processes on this node it is",
                "Give each rank RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, or use "
                "torchrun.",
            )
    hosts = _hosts_of_job(environ)
    if len(hosts) > 1:
        names = ", ".join(hosts[:4]) + (", ..." if len(hosts) > 4 else "")
        raise UsageError(
            f"this job has {len(hosts)} nodes ({names}); started like this, runner would use this "
            "one alone",
            "Start one process for each rank: mpirun -np RANKS runner train RUN --bundle BUNDLE.",
        )
