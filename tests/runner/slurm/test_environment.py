"""Slurm's variables. The environments are copies of Slurm 22.05's; tests/site compares them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.errors import UsageError
from runner.slurm import environment as slurm_environment
from tests.runner.launch.test_local import STEP


@pytest.mark.parametrize(
    "name", ["SLURM_JOB_NODELIST", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"]
)
def test_half_an_environment_is_refused_naming_what_is_missing(name: str) -> None:
    half = {variable: value for variable, value in STEP.items() if variable != name}
    with pytest.raises(UsageError, match=f"{name} is not set"):
        slurm_environment.SlurmJobEnvironment.from_environ(half)


def test_a_variable_that_is_no_number_is_named() -> None:
    with pytest.raises(UsageError, match="SLURM_PROCID='x' is not a number"):
        slurm_environment.SlurmJobEnvironment.from_environ(STEP | {"SLURM_PROCID": "x"})


@pytest.mark.parametrize(
    ("text", "counts"), [("1", (1,)), ("2(x2)", (2, 2)), ("3,1", (3, 1)), ("2(x3),1", (2, 2, 2, 1))]
)
def test_task_counts(text: str, counts: tuple[int, ...]) -> None:
    assert slurm_environment.task_counts(text) == counts


@pytest.mark.parametrize("text", ["", "two", "2(x)", "2,,1"])
def test_task_counts_that_cannot_be_read_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        slurm_environment.task_counts(text)


@pytest.mark.parametrize(
    ("nodes", "hosts"),
    [
        ("n1", "n1"),
        ("n[1-2]", "n1 n2"),
        ("gpu[007-009,12],login", "gpu007 gpu008 gpu009 gpu12 login"),
        ("gpu[3,5-6]", "gpu3 gpu5 gpu6"),
        ("a1,b2", "a1 b2"),
        ("r[0-1]n[09-10]", "r0n09 r0n10 r1n09 r1n10"),
        ("c[1-2]-ib.site.example", "c1-ib.site.example c2-ib.site.example"),
    ],
)
def test_every_host_of_a_host_list_is_named_in_its_order(nodes: str, hosts: str) -> None:
    assert slurm_environment.host_names(nodes) == hosts.split()


@pytest.mark.parametrize("nodes", ["(null)", "[", ""])
def test_a_host_list_without_a_host_is_refused(nodes: str) -> None:
    with pytest.raises(UsageError, match="not one of Slurm"):
        slurm_environment.host_names(nodes)


@given(
    job=st.integers(1, 2**26),
    step=st.integers(0, 1000),
    ephemeral=st.tuples(st.integers(0, 65535), st.integers(0, 65535)).map(
        lambda pair: (min(pair), max(pair))
    ),
)
def test_the_master_port_is_no_privileged_and_no_ephemeral_one(
    job: int, step: int, ephemeral: tuple[int, int]
) -> None:
    low, high = ephemeral
    port = slurm_environment.master_port(job, step, ephemeral)
    assert 10000 <= port < 65536
    if low > 11000 or high < 64000:
        assert not low <= port <= high
