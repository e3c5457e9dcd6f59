"""Argv and environment of the ranks: who this process is, and how the others are started.

`role` says whether this process is a rank, the launcher of a Slurm job, or the launcher on one machine.
A launcher calls `run_batch` (runner.batch, srun) or `run_local` (runner.ranks): both start the same command once per
rank, hand signals on, end all ranks when one fails, and return an exit code of the contract (5: run it again).
A rank calls `rank_environment` and exports `RankEnvironment.variables()` before torch or deepspeed is imported.
Nothing here imports torch.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from runner.batch import run_batch
from runner.errors import UsageError
from runner.master import master_address
from runner.ranks import MEETING_FILE, RANK_FLAG, SENTINEL, TORCH_VARIABLES, run_local
from runner.slurm import SlurmJobEnvironment, master_port

__all__ = [
    "MEETING_FILE",
    "RANK_FLAG",
    "SENTINEL",
    "RankEnvironment",
    "Role",
    "rank_environment",
    "role",
    "run_batch",
    "run_local",
    "runner_command",
]

Role = Literal["rank", "batch", "local"]


@dataclass(frozen=True, kw_only=True)
class RankEnvironment:
    """Which rank this is, of how many, and where rank 0 listens."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int

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
    """What this process has to be: a rank, or the launcher of ranks with srun ("batch") or by itself ("local").

    A task of a step of several is a rank. A step of one task, or a `srun --pty` shell, is a machine to launch on;
    the rest of an allocation (batch script, salloc shell) launches with srun, unless `processes` is given.

    Raises:
        UsageError: `processes` where Slurm already started several tasks or several nodes are allocated, or an
            interactive shell that holds one of several nodes.
    """
    if environ.get(RANK_FLAG) == "1" or all(name in environ for name in TORCH_VARIABLES):
        return "rank"
    job = SlurmJobEnvironment.from_environ(environ)
    if job is None:
        return "local"
    step = job.step
    if step is None:
        if processes is None:
            return "batch"
        if job.num_nodes > 1:
            raise UsageError(
                f"--processes {processes} starts ranks on one machine, but this job has {job.num_nodes} nodes",
                "Leave --processes away: inside a job, srun starts the ranks on all nodes.",
            )
        return "local"
    if step.world_size == 1:
        return "local"
    if not job.interactive:
        if processes is not None:
            raise UsageError(
                f"--processes {processes} starts ranks, but srun has already started {step.world_size} tasks",
                "Leave --processes away, or run it without srun.",
            )
        return "rank"
    if len(step.tasks_per_node) > 1:
        raise UsageError(
            f"this shell is one of {step.world_size} tasks on {len(step.tasks_per_node)} nodes; "
            "from here only this node can be used",
            "Use `salloc` with the same options instead of `srun --pty`, then run it again.",
        )
    return "local"


def rank_environment(environ: Mapping[str, str]) -> RankEnvironment:
    """This rank's place, from Airlift's or torchrun's variables, else from Slurm's.

    Raises:
        UsageError: a variable is missing or contradicts another, or rank 0 cannot be located from this node.
    """
    if all(name in environ for name in TORCH_VARIABLES):
        return _checked(
            RankEnvironment(
                rank=_integer(environ, "RANK"),
                world_size=_integer(environ, "WORLD_SIZE"),
                local_rank=_integer(environ, "LOCAL_RANK"),
                local_world_size=_integer(environ, "LOCAL_WORLD_SIZE", environ["WORLD_SIZE"]),
                master_addr=environ["MASTER_ADDR"],
                master_port=_integer(environ, "MASTER_PORT"),
            )
        )
    job = SlurmJobEnvironment.from_environ(environ)
    if job is None or job.step is None:
        missing = ", ".join(name for name in TORCH_VARIABLES if name not in environ)
        raise UsageError(f"this process should be a rank, but {missing} are not set", "Start it with `runner train`.")
    step = job.step
    if len(set(step.tasks_per_node)) > 1:
        raise UsageError(
            f"Slurm placed the {step.world_size} ranks unevenly: {step.tasks_per_node} on the nodes {step.nodes}",
            "Give sbatch and srun --ntasks-per-node, not only --ntasks.",
        )
    if step.rank == 0 and step.node_rank != 0:
        raise UsageError(
            f"rank 0 is not on the first node of {step.nodes}, where the other ranks look for it",
            "Leave --distribution and SLURM_HOSTFILE away, or set MASTER_ADDR to the host of rank 0.",
        )
    num_nodes = len(step.tasks_per_node)
    port = environ.get("MASTER_PORT") or str(master_port(job.job_id, step.step_id))
    return _checked(
        RankEnvironment(
            rank=step.rank,
            world_size=step.world_size,
            local_rank=step.local_rank,
            local_world_size=step.tasks_per_node[step.node_rank],
            master_addr=master_address(environ, step.nodes, num_nodes),
            master_port=_integer({"MASTER_PORT": port}, "MASTER_PORT"),
        )
    )


def _checked(place: RankEnvironment) -> RankEnvironment:
    if not (0 <= place.rank < place.world_size and 0 <= place.local_rank < place.local_world_size <= place.world_size):
        raise UsageError(f"these rank variables contradict each other: {place.variables()}")
    return place


def _integer(environ: Mapping[str, str], name: str, default: str = "") -> int:
    text = environ.get(name, default)
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{name}={text!r} is not a number") from None


def runner_command(*arguments: str, prefix: Path | None = None) -> list[str]:
    """`runner ARGUMENTS` in the environment at `prefix`, activated; None: by this interpreter.

    By its script, so that no folder named `runner` can shadow it.
    """
    if prefix is not None:
        activated = ["sh", "-c", '. "$0"; exec "$@"', str(prefix / "activate")]
        return [*activated, str(prefix / "bin" / "python"), str(prefix / "bin" / "runner"), *arguments]
    script = Path(sys.executable).parent / "runner"
    return [sys.executable, str(script) if script.is_file() else "-mrunner", *arguments]
