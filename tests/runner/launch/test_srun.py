"""The srun side, as far as it is text; tests/site runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from runner.errors import UsageError
from runner.launch import srun
from runner.launch.place import Place, Start
from runner.slurm.environment import (
    SlurmJobEnvironment,
    cpus_per_task,
    tasks_per_node,
)
from tests.first_job.harness import programs
from tests.remedies.obeyed import in_it, obeys
from tests.runner.launch.test_local import BATCH, STEP


def job(**changes: str) -> tuple[SlurmJobEnvironment, dict[str, str]]:
    environ = BATCH | {"SLURM_JOB_CPUS_PER_NODE": "64(x2)"} | changes
    environ = {name: value for name, value in environ.items() if value}
    found = SlurmJobEnvironment.from_environ(environ)
    assert found is not None
    return found, environ


def test_without_cpus_per_task_a_rank_gets_its_share_of_the_smallest_node() -> None:
    assert cpus_per_task(*job()) == 32
    assert cpus_per_task(*job(SLURM_JOB_CPUS_PER_NODE="64,9")) == 4
    assert cpus_per_task(*job(SLURM_JOB_CPUS_PER_NODE="1(x2)")) == 1


@obeys("runner/launch/place.py", "Submit it with `runner submit`.")
@obeys("runner/slurm/environment.py", "Give sbatch --ntasks-per-node instead of --ntasks.")
def test_tasks_are_spread_evenly_or_refused() -> None:
    assert tasks_per_node(job(SLURM_NTASKS_PER_NODE="", SLURM_NTASKS="6")[0]) == 3
    assert tasks_per_node(job(SLURM_NTASKS_PER_NODE="", SLURM_NTASKS="")[0]) == 1
    with pytest.raises(UsageError, match="5 tasks do not divide among 2 nodes") as refused:
        tasks_per_node(job(SLURM_NTASKS_PER_NODE="", SLURM_NTASKS="5")[0])
    option = in_it(refused.value.remedy, "--[a-z-]+(?= instead)")
    variable = f"SLURM_{option.strip('-').replace('-', '_').upper()}"  # as sbatch sets it
    assert tasks_per_node(job(SLURM_NTASKS="", **{variable: "3"})[0]) == 3
    with pytest.raises(UsageError, match="not inside a Slurm job") as refused:
        Start.in_job({})
    assert "runner submit" in refused.value.remedy
    assert Start.in_job(BATCH).world_size == 4, "the job that it makes"


@pytest.mark.parametrize(
    ("given", "threads"), [("8", "8"), ("", "32"), ("0", "32"), ("auto", "32"), ("4,1", "4")]
)
def test_a_number_of_threads_that_is_none_ends_no_rank(given: str, threads: str) -> None:
    """`export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK` where Slurm sets no such variable."""
    described, environ = job(OMP_NUM_THREADS=given)
    assert srun.srun_environment(described, environ, 12345)["OMP_NUM_THREADS"] == threads


@pytest.mark.parametrize(
    "bound", ["SLURM_GPUS_PER_TASK", "SLURM_NTASKS_PER_GPU", "SLURM_TRES_PER_TASK"]
)
def test_srun_binds_no_rank_to_its_own_gpu_unless_the_user_asked_for_a_binding(bound: str) -> None:
    """NCCL cannot use NVLink to a GPU that its process does not see."""
    described, environ = job(**{bound: "1", "SLURM_GPU_BIND": "closest"})
    variables = srun.srun_environment(described, environ, 12345)
    assert bound not in variables
    assert variables["SLURM_GPU_BIND"] == "closest"


def test_a_users_own_srun_that_binds_is_told_what_it_costs() -> None:
    step = STEP | {"MASTER_ADDR": "192.0.2.1", "SLURM_GPUS_PER_TASK": "1"}
    notes = "\n".join(Place.of(step).notes)
    assert "srun --gpus-per-task shows each rank its own GPU alone" in notes
    chosen = Place.of(step | {"SLURM_GPU_BIND": "closest"})
    assert "own GPU alone" not in "\n".join(chosen.notes)


@pytest.mark.parametrize(("number", "code"), [(9, -9), (15, 5)])
def test_a_job_that_slurm_ends_before_scontrol_returns_has_said_that_it_comes_back(
    tmp_path: Path, number: int, code: int
) -> None:
    killed = f'[ "$1" = requeue ] && kill -{number} $PPID && exit\n'
    programs(tmp_path, scontrol=f"{killed}echo JobId=1234 JobState=RUNNING BatchFlag=1")
    launcher = (
        "import os; from runner.launch.requeue import requeue;"
        "from runner.slurm.environment import SlurmJobEnvironment as Job;"
        "requeue(Job.from_environ(os.environ))"
    )
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    ended = subprocess.run(
        [sys.executable, "-c", launcher],
        env=job()[1] | {"PATH": path, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == code and "error" not in ended.stderr, ended.stderr
    assert "goes back in the queue (restart 1 of at most 32)" in ended.stdout + ended.stderr
