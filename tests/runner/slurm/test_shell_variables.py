"""Variables of this shell never win over the run file, and what a job gets of them is printed."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.from_stage import IncompleteError
from runner.slurm.environment import notes_on_variables, overriding
from runner.slurm.jobs import ask, job_number
from tests.first_job.harness import programs

SCRIPT = """\
#!/bin/bash -l
# One rank for each GPU.
#SBATCH --partition=gpu
#SBATCH --gres=gpu:4
#SBATCH --time=08:00:00
#SBATCH --requeue
#SBATCH --job-name='my run'

set -e
#SBATCH --qos=high
"""


@pytest.mark.parametrize(
    ("name", "value", "counts"),
    [
        ("PARTITION", "debug", "--partition=gpu"),
        ("TIMELIMIT", "10", "--time=08:00:00"),
        ("GRES", "gpu:1", "--gres=gpu:4"),
        ("GPUS", "1", "--gres=gpu:4"),
        ("GPUS_PER_NODE", "1", "--gres=gpu:4"),
        ("NO_REQUEUE", "1", "--requeue"),
        ("JOB_NAME", "other", "--job-name=my run"),
        ("WAIT", "1", ""),
        ("ARRAY_INX", "0-9", ""),
    ],
)
def test_what_would_change_the_job_is_not_handed_to_sbatch(
    name: str, value: str, counts: str
) -> None:
    environ = {f"SBATCH_{name}": value, "RANK": "3", "HOME": "/h"}
    assert overriding(SCRIPT, environ) == {f"SBATCH_{name}": counts}
    why = counts and f": the job asks for {counts}"
    assert notes_on_variables(SCRIPT, environ) == [
        f"SBATCH_{name}={value} of this shell is not used{why}",
        "the job does not get RANK of this shell: srun sets them",
    ]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ACCOUNT", "proj"),  # the script says nothing of it
        ("QOS", "low"),  # sbatch does not read that line of the script either
        ("PARTITION", "gpu"),
        ("JOB_NAME", "my run"),
    ],
)
def test_what_changes_nothing_stays(name: str, value: str) -> None:
    stays = f"options of the job from this shell: SBATCH_{name}={value}"
    assert notes_on_variables(SCRIPT, {f"SBATCH_{name}": value, "SBATCHER": "x"}) == [stays]


@pytest.mark.parametrize(
    ("output", "number"),
    [
        ("17\n", "17"),
        ("17;north\n", "17"),
        ("Welcome to node 3\n\n--> Verifying your request ... OK\n17\n", "17"),
        ("Welcome\n", ""),
    ],
)
def test_the_number_of_a_job_is_found_below_a_greeting_of_the_site(
    output: str, number: str
) -> None:
    assert job_number(output) == number


def test_slurm_that_does_not_answer_is_not_waited_for_and_hears_of_no_job_around_us(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = programs(tmp_path, squeue="exec sleep 60", sinfo="exec /usr/bin/env")
    monkeypatch.setenv("PATH", path)
    with pytest.raises(IncompleteError, match="squeue did not answer in 0 seconds"):
        ask("squeue", timeout_s=0.2)
    for name in ("SLURM_CONF", "SLURM_JOB_ID", "SBATCH_QOS", "SBATCH_ACCOUNT"):
        monkeypatch.setenv(name, "x")
    told = ask("sinfo", without=["SBATCH_QOS"])
    assert told is not None and {"SLURM_CONF=x", "SBATCH_ACCOUNT=x"} <= {*told.stdout.split()}
    assert not {"SLURM_JOB_ID=x", "SBATCH_QOS=x"} & {*told.stdout.split()}
