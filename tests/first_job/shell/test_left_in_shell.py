"""What an earlier trial left in the shell: variables of ranks, of sbatch, of a job that ended."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from runner.launch.network import GLOO, NCCL, loopback_variables
from tests.first_job.harness import Found, assert_found, programs, run_runner, write_run
from tests.remedies.obeyed import in_it, obeys

GPT2 = {"task": "causal-lm", "model": {"asset": "gpt2"}}
OF_RANK = {"RANK": "0", "WORLD_SIZE": "8", "LOCAL_RANK": "0"}
MASTER = {"MASTER_ADDR": "n1", "MASTER_PORT": "29500"}
IN_JOB = {"SLURM_JOB_ID": "17", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[1-2]"}
SINFO = 'echo "gpu*|8|64000|gpu:4|infinite"'
OVER = 'echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1'

REFUSED = {"L14": Found(("this is rank 0 of 8",), "unset RANK WORLD_SIZE LOCAL_RANK")}


def test_ranks_are_not_started_by_what_is_a_rank_itself(staged: Path, tmp_path: Path) -> None:
    write_run(tmp_path, **GPT2)
    command = ("train", "tiny.yaml", "--bundle", str(staged), "--processes", "2")
    assert_found(run_runner(tmp_path, *command, **OF_RANK, **MASTER), REFUSED["L14"])


def test_the_run_file_wins_over_sbatchs_variables(staged: Path, tmp_path: Path) -> None:
    sbatch = 'env | sort >"$0.$1"; echo "Welcome to Gpu-Land"; echo; echo 17'
    path = programs(tmp_path / "bin", sbatch=sbatch, sinfo=SINFO, squeue="exit 0")
    write_run(tmp_path, **GPT2, slurm={"partition": "gpu"})
    said = run_runner(
        tmp_path, "submit", "tiny.yaml", "--bundle", str(staged), PATH=path,
        SBATCH_PARTITION="debug", SBATCH_ACCOUNT="proj", SBATCH_WAIT="1", RANK="0",
    )  # fmt: skip
    assert said.code == 0, said.err
    assert "submitted job 17" in said.out
    assert "SBATCH_PARTITION=debug of this shell is not used" in said.out
    for asked in ("--test-only", "--parsable"):
        handed = (tmp_path / f"bin/sbatch.{asked}").read_text()
        assert "SBATCH_ACCOUNT=proj\n" in handed
        assert "SBATCH_PARTITION" not in handed and "SBATCH_WAIT" not in handed


def test_a_partition_that_only_the_shell_names_is_the_one_that_is_looked_at(
    staged: Path, tmp_path: Path
) -> None:
    sinfo = (
        f'case "$*" in *partition=debug*) echo "debug|8|64000|gpu:4|1:00:00" ;; *) {SINFO} ;; esac'
    )
    path = programs(tmp_path / "bin", sbatch="exit 0", sinfo=sinfo, squeue="exit 0")
    write_run(tmp_path, **GPT2, slurm={"time": "08:00:00"})
    said = run_runner(
        tmp_path, "check", "tiny.yaml", "--bundle", str(staged), PATH=path, SBATCH_PARTITION="debug"
    )
    assert_found(said, Found(("08:00:00 is more than partition debug allows",), "Lower it"))


@obeys("runner/slurm/jobs.py", "Open a new shell; or, in bash: unset ${!SLURM_@}")
def test_a_job_that_is_over_is_not_taken_for_one_that_runs(staged: Path, tmp_path: Path) -> None:
    path = programs(tmp_path / "bin", sbatch="exit 0", sinfo=SINFO, squeue=OVER)
    write_run(tmp_path, **GPT2, slurm={"partition": "gpu"})
    command: tuple[str, ...] = ("check", "tiny.yaml", "--bundle", str(staged))
    said = run_runner(tmp_path, *command, PATH=path, **IN_JOB)
    assert "SLURM_JOB_ID=17 of this shell is a job that is over" in said.out, said
    line = in_it(said.out, r"(?<=in bash: )unset \S+")
    left = subprocess.run(
        ["bash", "-c", f"{line}; compgen -e"], env=IN_JOB, stdout=subprocess.PIPE, check=True
    ).stdout.split()
    variables = {name: value for name, value in IN_JOB.items() if name.encode() in left}
    assert "is a job that is over" not in run_runner(tmp_path, *command, PATH=path, **variables).out
    command = ("train", "tiny.yaml", "--bundle", str(staged), "--processes", "2")
    found = Found(("SLURM_JOB_ID=17 of this shell is a job that is over",), "unset ${!SLURM_@}")
    assert_found(run_runner(tmp_path, *command, PATH=path, **IN_JOB), found)


@pytest.mark.parametrize("name", [GLOO, NCCL])
def test_an_interface_of_other_nodes_does_not_end_ranks_of_one_machine(name: str) -> None:
    """A rehearsal's ranks have loopback alone, whatever ~/.bashrc names for the nodes."""
    variables, lines = loopback_variables({name: "ib0"}, ["lo"])
    assert variables[name] == "lo"
    assert "there is no ib0 here" in lines[0]
    variables, lines = loopback_variables({name: "ib0"}, ["lo", "ib0"])
    assert name not in variables and lines == []
