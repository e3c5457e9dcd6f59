"""Processes of mpirun, with the variables of Open MPI 5.0.11 and MPICH 5.0.2.

Which rank each of them is, also those of MVAPICH2 and PALS: tests/golden/ranks.json.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from runner.errors import UsageError
from runner.launch.place import Place, variables_between_nodes
from runner.run_folder.layout import read_metrics
from tests.runner.conftest import Cluster
from tests.runner.launch.test_local import BATCH, STEP, found
from tests.support.warm import warm_python

SHORT = ("--set", "steps=2", "--set", "checkpoint.every=2", "--set", "engine.name=ddp")


def open_mpi(rank: int, size: int, local: int) -> dict[str, str]:
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(size),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank % local),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(local),
        "PMIX_RANK": str(rank),
        "PMIX_NAMESPACE": "prterun-n1-4711@1",
    }


def mpich(rank: int, size: int, local: int) -> dict[str, str]:
    return {
        "PMI_RANK": str(rank),
        "PMI_SIZE": str(size),
        "MPI_LOCALRANKID": str(rank % local),
        "MPI_LOCALNRANKS": str(local),
    }


def test_a_single_process_of_mpirun_is_a_machine_to_launch_on_and_one_of_several_is_not() -> None:
    assert found(open_mpi(0, 1, 1), processes=2) == "local"
    with pytest.raises(UsageError, match="mpirun has already started 4 processes"):
        found(mpich(1, 4, 4), processes=2)


def test_ranks_that_srun_starts_from_a_process_of_mpirun_are_slurms() -> None:
    place = Place.of(STEP | open_mpi(0, 1, 1) | {"AIRLIFT_RANK": "1", "MASTER_ADDR": "10.77.0.1"})
    assert (place.rank, place.world_size) == (3, 4)


def test_ranks_on_several_nodes_that_do_not_know_rank_0_are_told_the_line_to_write() -> None:
    with pytest.raises(UsageError, match="does not know where rank 0 is") as refused:
        Place.of(open_mpi(2, 4, 2))
    for wrong in ("127.0.0.1", "192.0.2.77"):  # without it, no rank knows where rank 0 is
        with pytest.raises(UsageError, match=f"MASTER_ADDR={wrong}") as again:
            Place.of(open_mpi(0, 4, 2) | {"MASTER_ADDR": wrong})
        assert again.value.remedy == refused.value.remedy
    assert "export MASTER_ADDR=FIRST_HOST" in refused.value.remedy
    place = Place.of(open_mpi(2, 4, 2) | {"MASTER_ADDR": "192.0.2.1"})
    assert (place.rank, place.master) == (2, "192.0.2.1")
    with pytest.raises(UsageError, match="rank 0 runs on n2, not on n1, the job's first host"):
        Place.of(BATCH | open_mpi(0, 4, 2) | {"SLURMD_NODENAME": "n2"})
    assert variables_between_nodes(mpich(2, 4, 2)) == (
        {},
        [
            "rank 2 of MPICH or Intel MPI does not know where rank 0 is: MASTER_ADDR is not set",
        ],
    )


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("PBS_NODEFILE", "n1\nn1\nn2\nn2\n"),
        ("LSB_DJOB_HOSTFILE", "n1\nn2\n"),
        ("LSB_MCPU_HOSTS", "n1 4 n2 4"),
        ("PE_HOSTFILE", "n1 2 q@n1 U\nn2 2 q U\n"),
    ],
)
def test_a_lone_process_in_a_job_of_two_hosts_is_refused_with_the_line_to_write(
    tmp_path: Path, variable: str, text: str
) -> None:
    """It would train on one of them, and nobody would notice."""
    hosts = tmp_path / "hosts"
    hosts.write_text(text)
    environ = {variable: text if variable == "LSB_MCPU_HOSTS" else str(hosts)}
    with pytest.raises(UsageError, match=r"this job has 2 nodes \(n1, n2\)") as refused:
        found(environ)
    assert "mpirun -np RANKS runner train" in refused.value.remedy
    assert refused.value.exit_code == 2
    assert found({**environ, **mpich(0, 2, 1)}) == "rank"


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({"RANK": "1", "WORLD_SIZE": "2"}, "LOCAL_RANK, MASTER_ADDR, MASTER_PORT are not set"),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "n1"},
            "MASTER_PORT is not set",
        ),
        (
            {"PMI_RANK": "1", "PMI_SIZE": "2"},
            r"an MPI launcher started this process \(PMI_RANK=1\)",
        ),
        ({"PMIX_RANK": "1"}, r"PMIX_RANK=1"),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, r"OMPI_COMM_WORLD_RANK=1"),
        ({"OMPI_COMM_WORLD_RANK": "1"}, r"OMPI_COMM_WORLD_RANK=1"),
        ({"PALS_RANKID": "1", "PMI_SIZE": "2"}, r"PALS_RANKID=1"),
    ],
)
def test_variables_that_do_not_say_all_are_refused_and_no_launcher_starts(
    environ: Mapping[str, str], says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        found(environ)


def start_ranks(
    cluster: Cluster, launcher: Callable[[int, int, int], dict[str, str]], *options: str
) -> list[subprocess.CompletedProcess[str]]:
    """Two real processes with the variables of a launcher."""
    words, python = ["train", "tiny.yaml", *SHORT, *options], warm_python()
    processes = [
        cluster.start(*words, python=python, **launcher(rank, 2, 2), MASTER_PORT="28471")
        for rank in range(2)
    ]
    said = [process.communicate(timeout=300) for process in processes]
    return [
        subprocess.CompletedProcess([], process.returncode, *texts)
        for process, texts in zip(processes, said, strict=True)
    ]


def test_processes_with_mpis_variables_train_together_and_the_first_prepares(
    cluster: Cluster,
) -> None:
    cluster.write()
    first, second = start_ranks(cluster, open_mpi)
    assert (first.returncode, second.returncode) == (0, 0), (first, second)
    assert (
        len([line for line in read_metrics(cluster.output() / "metrics.jsonl") if "loss" in line])
        == 2
    )
    assert first.stdout.count("train: prepared") == 1 and "train: prepared" not in second.stdout
    again = start_ranks(cluster, open_mpi)
    assert [done.returncode for done in again] == [0, 0]
    assert "finished already" in again[0].stdout and again[1].stdout == ""


def test_what_the_first_refuses_ends_the_others_with_its_code(cluster: Cluster) -> None:
    cluster.write(batch={"global": 9, "micro": 1})
    first, second = start_ranks(cluster, mpich)
    assert (first.returncode, second.returncode) == (2, 2), (first, second)
    assert "batch.global 9 does not divide" in first.stderr
    assert "rank 0" in second.stderr and "Traceback" not in first.stderr + second.stderr


def test_a_dry_run_of_ranks_checks_once_and_starts_nothing(cluster: Cluster) -> None:
    cluster.write()
    first, second = start_ranks(cluster, mpich, "--dry-run")
    assert (first.returncode, second.returncode, second.stdout) == (0, 0, ""), (first, second)
    assert "dry run: nothing was started" in first.stdout
    assert not cluster.output().exists()
