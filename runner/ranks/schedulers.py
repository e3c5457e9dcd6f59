"""Reads the variables of other launchers than srun and torchrun: mpirun, PBS, LSF and SGE.

`mpi_task` is the rank that an MPI launcher gave this process. `job_hosts` are the hosts of its job,
if this node can read them. `check_complete` says what to write if the variables are incomplete.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from runner.errors import UsageError
from runner.slurm.environment import read_number

PAGE = "docs/howto/other-schedulers.md"
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
    ("MPICH or Intel MPI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
_HOST_FILES = (("PBS", "PBS_NODEFILE"), ("LSF", "LSB_DJOB_HOSTFILE"), ("SGE", "PE_HOSTFILE"))
_JOB_NUMBERS = (("PBS", "PBS_JOBID"), ("LSF", "LSB_JOBID"), ("SGE", "JOB_ID"))


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


def job_hosts(environ: Mapping[str, str]) -> tuple[str, list[str]]:
    """The scheduler around this process, and the hosts of its job in order.

    Returns:
        ("", []) without a scheduler. The hosts are empty if this node cannot read them: PBS and SGE
        write them to a file on the job's first node.
    """
    for scheduler, variable in _HOST_FILES:
        if path := environ.get(variable):
            try:
                lines = Path(path).read_text(encoding="utf-8").splitlines()
            except (OSError, ValueError):
                continue
            return scheduler, list(dict.fromkeys(line.split()[0] for line in lines if line.strip()))
    if hosts_and_counts := environ.get("LSB_MCPU_HOSTS", "").split():
        return "LSF", list(dict.fromkeys(hosts_and_counts[::2]))
    if hosts := environ.get("LSB_HOSTS", "").split():
        return "LSF", list(dict.fromkeys(hosts))
    in_sge = "PE_HOSTFILE" in environ or "SGE_ROOT" in environ
    found = [
        name for name, variable in _JOB_NUMBERS if variable in environ and (name != "SGE" or in_sge)
    ]
    return (found[0] if found else "", [])


def job_number(environ: Mapping[str, str]) -> int:
    """A number that is equal in all ranks of a job, and rarely equal in other jobs on the node."""
    named = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid")
    text = named or next(
        (environ[variable] for _, variable in _JOB_NUMBERS if environ.get(variable)), ""
    )
    if match := re.match(r"\d+", text):
        return int(match[0])
    return zlib.crc32(text.encode()) if text else os.getuid()


def how_to_name_rank_0(scheduler: str, launcher: str) -> str:
    """The advice to export MASTER_ADDR, so that all ranks know where rank 0 is."""
    first = {
        "PBS": "$(head -n 1 $PBS_NODEFILE)",
        "LSF": "$(echo $LSB_MCPU_HOSTS | cut -d' ' -f1)",
        "SGE": "$(head -n 1 $PE_HOSTFILE | cut -d' ' -f1)",
    }.get(scheduler, "FIRST_HOST")
    forward = " and give mpirun -x MASTER_ADDR" if launcher == "Open MPI" else ""
    return f"Write before mpirun: export MASTER_ADDR={first}{forward} ({PAGE})."


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
                f"torchrun ({PAGE}).",
            )
    scheduler, hosts = job_hosts(environ)
    if len(hosts) > 1:
        names = ", ".join(hosts[:4]) + (", ..." if len(hosts) > 4 else "")
        raise UsageError(
            f"this {scheduler} job has {len(hosts)} nodes ({names}); "
            "started like this, runner would use this one alone",
            "Start one process for each rank: mpirun -np RANKS runner train RUN --bundle BUNDLE "
            f"({PAGE}).",
        )
