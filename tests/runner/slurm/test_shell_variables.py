"""Variables of this shell never win over the run file, and what a job gets of them is printed."""

from __future__ import annotations

import pytest

from runner.slurm.commands import job_number
from runner.slurm.shell_variables import overriding

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
    ("name", "value"),
    [
        ("PARTITION", "debug"),
        ("TIMELIMIT", "10"),
        ("GRES", "gpu:1"),
        ("GPUS", "1"),
        ("GPUS_PER_NODE", "1"),
        ("NO_REQUEUE", "1"),
        ("JOB_NAME", "other"),
        ("WAIT", "1"),
        ("ARRAY_INX", "0-9"),
    ],
)
def test_what_would_change_the_job_is_not_handed_to_sbatch(name: str, value: str) -> None:
    assert list(overriding(SCRIPT, {f"SBATCH_{name}": value})) == [f"SBATCH_{name}"]


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
    assert overriding(SCRIPT, {f"SBATCH_{name}": value}) == {}


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
