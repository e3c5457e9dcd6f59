"""The srun side, as far as it is text; tests/site runs it."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import pytest

from runner.from_stage import UsageError
from runner.launch import supervise
from runner.launch.ranks import Start
from runner.slurm.environment import (
    SlurmJobEnvironment,
    cpus_per_task,
    tasks_per_node,
)
from runner.slurm.jobs import step_name
from tests.first_job.harness import programs
from tests.runner.launch.test_local import BATCH


def job(**changes: str) -> tuple[SlurmJobEnvironment, dict[str, str]]:
    environ = BATCH | {"SLURM_JOB_CPUS_PER_NODE": "64(x2)"} | changes
    environ = {name: value for name, value in environ.items() if value}
    found = SlurmJobEnvironment.from_environ(environ)
    assert found is not None
    return found, environ


@pytest.mark.parametrize(
    ("changes", "ranks", "cpus"),
    [
        ({}, 2, 32),
        ({"SLURM_JOB_CPUS_PER_NODE": "64,9"}, 2, 4),
        ({"SLURM_JOB_CPUS_PER_NODE": "1(x2)"}, 2, 1),
        ({"SLURM_JOB_CPUS_PER_NODE": ""}, 2, 1),
        ({"SLURM_CPUS_PER_TASK": "5"}, 2, 5),
        ({"SLURM_NTASKS_PER_NODE": "", "SLURM_NTASKS": "6"}, 3, 21),
        ({"SLURM_NTASKS_PER_NODE": "", "SLURM_NTASKS": ""}, 1, 64),
    ],
)
def test_a_rank_gets_its_share_of_the_smallest_node(
    changes: dict[str, str], ranks: int, cpus: int
) -> None:
    described, environ = job(**changes)
    assert (tasks_per_node(described), cpus_per_task(described, environ)) == (ranks, cpus)


def test_tasks_are_spread_evenly_or_refused() -> None:
    with pytest.raises(UsageError, match="5 tasks do not divide among 2 nodes"):
        tasks_per_node(job(SLURM_NTASKS_PER_NODE="", SLURM_NTASKS="5")[0])
    with pytest.raises(UsageError, match="not inside a Slurm job"):
        Start.in_job({})


@pytest.mark.parametrize(
    ("given", "threads"), [("8", "8"), ("", "32"), ("0", "32"), ("auto", "32"), ("4,1", "4")]
)
def test_a_number_of_threads_that_is_none_ends_no_rank(given: str, threads: str) -> None:
    """`export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK` where Slurm sets no such variable."""
    described, environ = job(OMP_NUM_THREADS=given)
    assert supervise.srun_environment(described, environ, 12345)["OMP_NUM_THREADS"] == threads


@pytest.mark.parametrize(("number", "code"), [(9, -9), (15, 5)])
def test_a_job_that_slurm_ends_before_scontrol_returns_has_said_that_it_comes_back(
    tmp_path: Path, number: int, code: int
) -> None:
    killed = f'[ "$1" = requeue ] && kill -{number} -$LAUNCHER && exit\n'  # and its children
    programs(tmp_path, scontrol=f"{killed}echo JobId=1234 JobState=RUNNING BatchFlag=1")
    launcher = (
        "import os; from runner.slurm.requeue import requeue;"
        "requeue({**os.environ, 'LAUNCHER': str(os.getpid())})"
    )
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    ended = subprocess.run(
        [sys.executable, "-c", launcher],
        env=job()[1] | {"PATH": path, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
        start_new_session=True,
    )
    assert ended.returncode == code and "error" not in ended.stderr, ended.stderr
    assert "goes back in the queue (restart 1 of at most 32)" in ended.stdout + ended.stderr


@pytest.mark.parametrize(
    "bound", ["SLURM_GPUS_PER_TASK", "SLURM_NTASKS_PER_GPU", "SLURM_TRES_PER_TASK"]
)
def test_srun_binds_no_rank_to_its_own_gpu_unless_the_user_asked_for_a_binding(bound: str) -> None:
    """NCCL cannot use NVLink to a GPU that its process does not see."""
    described, environ = job(**{bound: "1", "SLURM_GPU_BIND": "closest"})
    variables = supervise.srun_environment(described, environ, 12345)
    assert bound not in variables
    assert variables["SLURM_GPU_BIND"] == "closest"


# What `squeue --steps` prints: of a controller that does not answer, of ranks that still run at the
# first look, of ranks that have ended.
@pytest.mark.parametrize(
    ("squeue", "said"),
    [
        ("echo slurm_load_jobs error >&2; exit 1", "Slurm does not report whether the ranks ended"),
        ('[ -e "{0}" ] || echo "17.3|{1}"; touch "{0}"', "the ranks still run: scancel 17.3"),
        ("true", ""),
    ],
)
def test_a_launcher_ends_its_ranks_and_says_what_it_does_not_know(
    squeue: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    step = step_name(platform.node(), 99)
    asked = tmp_path / "asked"
    programs(
        tmp_path, squeue=squeue.format(tmp_path / "seen", step), scancel=f'echo "$1" >> {asked}'
    )
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(time, "sleep", lambda _: None)
    supervise.end_ranks(17, 99)
    err = capfd.readouterr().err
    assert said in err and bool(said) == bool(err.strip())
    assert asked.exists() == ("scancel" in said)
