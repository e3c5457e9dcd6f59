"""Slurm's variables. The environments are copies of Slurm 22.05's; tests/site compares them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.from_stage import UsageError
from runner.slurm import environment as slurm_environment
from tests.runner.launch.test_local import STEP


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        *(
            (name, "", "SLURM_{} is not set, although SLURM_JOB_ID is")
            for name in ("JOB_NODELIST", "PROCID", "LOCALID", "STEP_TASKS_PER_NODE")
        ),
        ("PROCID", "x", "SLURM_{}='x' is not a number"),
        ("PROCID", "-1", "SLURM_{}='-1' is not a number"),
        ("RESTART_COUNT", "\u0663", "SLURM_{}='\u0663' is not a number"),
    ],
)
def test_half_an_environment_is_refused_naming_what_is_missing_or_wrong(
    name: str, value: str, said: str
) -> None:
    with pytest.raises(UsageError, match=said.format(name)):
        slurm_environment.SlurmJobEnvironment.from_environ(STEP | {f"SLURM_{name}": value})


def test_all_that_slurm_says_of_a_job_and_its_step_is_read() -> None:
    told = {"SLURM_CPUS_PER_TASK": "8", "SLURM_GPUS_ON_NODE": "2", "SLURM_RESTART_COUNT": "1"}
    job = slurm_environment.SlurmJobEnvironment.from_environ(STEP | told | {"SLURM_PTY_PORT": "1"})
    assert job == slurm_environment.SlurmJobEnvironment(
        job_id=17, nodes="n[1-2]", num_nodes=2, tasks=4, tasks_per_node=2, cpus_per_task=8,
        gpus_on_node=2, restart_count=1, interactive=True,
        step=slurm_environment.SlurmStep(
            step_id=0, rank=3, world_size=4, local_rank=1, node_rank=1, tasks_per_node=(2, 2),
            nodes="n[1-2]",
        ),
    )  # fmt: skip
    assert slurm_environment.srun_command(job, {}, 1, ["--label", "x"]) == [
        "srun", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=16",
        "--mpi=none", "--export=ALL", "--input=none", "--label", "x",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "counts"), [("1", (1,)), ("2(x2)", (2, 2)), ("3,1", (3, 1)), ("2(x3),1", (2, 2, 2, 1))]
)
def test_task_counts(text: str, counts: tuple[int, ...]) -> None:
    assert slurm_environment.task_counts(text) == counts


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


@pytest.mark.parametrize(
    ("read", "text", "said"),
    [
        *((slurm_environment.host_names, text, "not one of Slurm") for text in ("(null)", "[", "")),
        *(
            (slurm_environment.task_counts, text, "is not a list of task counts")
            for text in ("", "two", "2(x)", "2,,1")
        ),
    ],
)
def test_a_list_of_slurms_that_cannot_be_read_is_refused(
    read: Callable[[str], object], text: str, said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        read(text)


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
    if low >= 11000 or high < 65536 - 1000:
        assert not low <= port <= high


@pytest.mark.parametrize(
    ("job", "step", "ephemeral", "port"),
    [
        (17, 0, (32768, 60999), 10017),
        (17, 2, (32768, 60999), 10017 + 2 * 1009),
        (22768, 0, (32768, 60999), 10000),
        (17, 0, (1024, 60000), 60018),
        (17, 0, (10999, 64536), 20017),
        (17, 0, (11000, 65535), 10017),
    ],
)
def test_the_master_port_is_the_same_in_each_version(
    job: int, step: int, ephemeral: tuple[int, int], port: int
) -> None:
    assert slurm_environment.master_port(job, step, ephemeral) == port
