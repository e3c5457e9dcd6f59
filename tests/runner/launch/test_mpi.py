"""Processes of mpirun, with the variables of Open MPI 5.0.11 and MPICH 5.0.2.

Which rank each of them is, also those of MVAPICH2 and PALS: tests/golden/ranks.json.
"""

from __future__ import annotations

import os
import platform
import shlex
import signal
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from runner.from_stage import UsageError
from runner.job.training_run import TrainingRun
from runner.launch import resolved
from runner.launch.ranks import RankInfo, variables_between_nodes
from runner.launch.resolved import Resolved, write_resolved
from runner.run_folder.heartbeat import read_failures
from runner.run_folder.layout import RunFolder, read_metrics
from runner.run_folder.run_lock import hold_run_folder
from tests.remedies.obeyed import in_it, obeys
from tests.runner.conftest import Cluster
from tests.runner.launch.test_local import BATCH, STEP, found
from tests.support.waiting import free_port, wait_for
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
    place = RankInfo.of(
        STEP | open_mpi(0, 1, 1) | {"AIRLIFT_RANK": "1", "MASTER_ADDR": "10.77.0.1"}
    )
    assert (place.rank, place.world_size) == (3, 4)


def test_ranks_on_several_nodes_that_do_not_know_rank_0_are_told_the_line_to_write() -> None:
    with pytest.raises(UsageError, match="does not know where rank 0 is") as refused:
        RankInfo.of(open_mpi(2, 4, 2))
    for wrong in ("127.0.0.1", "192.0.2.77"):  # without it, no rank knows where rank 0 is
        with pytest.raises(UsageError, match=f"MASTER_ADDR={wrong}") as again:
            RankInfo.of(open_mpi(0, 4, 2) | {"MASTER_ADDR": wrong})
        assert again.value.remedy == refused.value.remedy
    assert "export MASTER_ADDR=FIRST_HOST" in refused.value.remedy
    place = RankInfo.of(open_mpi(2, 4, 2) | {"MASTER_ADDR": "192.0.2.1"})
    assert (place.rank, place.master) == (2, "192.0.2.1")
    with pytest.raises(UsageError, match="rank 0 runs on n2, not on n1, the job's first host"):
        RankInfo.of(BATCH | open_mpi(0, 4, 2) | {"SLURMD_NODENAME": "n2"})
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


Launcher = Callable[[int, int, int], dict[str, str]]


def begin_ranks(cluster: Cluster, launcher: Launcher, *options: str) -> list[subprocess.Popen[str]]:
    """Two real processes with the variables of a launcher."""
    words, python = ["train", "tiny.yaml", *SHORT, *options], warm_python()
    port = free_port()
    return [
        cluster.start(*words, python=python, **launcher(rank, 2, 2), MASTER_PORT=port)
        for rank in range(2)
    ]


def start_ranks(
    cluster: Cluster, launcher: Launcher, *options: str
) -> list[subprocess.CompletedProcess[str]]:
    processes = begin_ranks(cluster, launcher, *options)
    said = [process.communicate(timeout=300) for process in processes]
    return [
        subprocess.CompletedProcess([], process.returncode, *texts)
        for process, texts in zip(processes, said, strict=True)
    ]


def prepare(cluster: Cluster, *options: str) -> str:
    """`runner prepare`, as before `start_ranks`; what it prints."""
    done = cluster.run("prepare", "tiny.yaml", *SHORT, *options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def codes(ended: list[subprocess.CompletedProcess[str]]) -> list[int]:
    return [one.returncode for one in ended]


def steps(cluster: Cluster) -> list[int]:
    lines = read_metrics(cluster.output() / "metrics.jsonl")
    return [line["step"] for line in lines if "loss" in line]


@obeys("runner/launch/resolved.py", "Once, before the ranks start: {}")
def test_ranks_end_at_once_until_the_folder_is_ready_and_then_train_together(
    cluster: Cluster,
) -> None:
    cluster.write()
    refused = start_ranks(cluster, open_mpi)
    assert codes(refused) == [2, 2] and refused[1].stderr == "", refused
    assert "is not ready for ranks: nothing was prepared in it" in refused[0].stderr
    words = shlex.split(in_it(refused[0].stderr, r"(?<=ranks start: )runner prepare .*"))
    assert "--set" in words
    done = subprocess.run(
        [warm_python(), "-m", *words], cwd=cluster.folder, env=cluster.environment(),
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.count("train: prepared") == 1
    assert (cluster.output() / "config.yaml").exists()
    first, second = start_ranks(cluster, open_mpi)
    assert codes([first, second]) == [0, 0], (first, second)
    assert steps(cluster) == [1, 2]
    again = start_ranks(cluster, open_mpi)
    assert codes(again) == [0, 0]
    assert "finished already" in again[0].stdout and again[1].stdout == ""


def test_variables_of_ranks_that_a_shell_has_left_are_said_where_nothing_is_ready(
    cluster: Cluster,
) -> None:
    cluster.write()
    left = {"RANK": "0", "WORLD_SIZE": "8", "LOCAL_RANK": "0"}
    left |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    done = cluster.run("train", "tiny.yaml", **left)
    assert done.returncode == 2 and "is not ready for ranks" in done.stderr
    assert "rank 0 of 8, as RANK and WORLD_SIZE of this shell say" in done.stderr
    assert "not meant? unset RANK WORLD_SIZE" in done.stderr


def test_a_folder_that_is_ready_for_another_run_is_refused_with_what_differs(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = cluster.write()
    run = TrainingRun.load(path, cluster.bundle, cluster.output(), ("seed=7",))
    run.folder.make()
    write_resolved(Resolved.of(run))
    assert resolved.why_not_ready(run) == ""
    load = partial(TrainingRun.load, path, cluster.bundle, cluster.output())
    other = load(("seed=8",))
    assert resolved.why_not_ready(other) == "it was prepared with --set seed=7"
    moved = replace(run, inputs=replace(run.inputs, bundle_id="0" * 64))
    assert "it was prepared from bundle" in resolved.why_not_ready(moved)
    cluster.write(batch={"global": 16, "micro": 2})
    assert resolved.why_not_ready(load(("seed=7",))) == (
        f"{path} has changed since it was prepared"
    )
    handed_over = run.folder.handed_over
    handed_over.write_bytes(handed_over.read_bytes()[:-9])
    assert resolved.why_not_ready(run) == "nothing was prepared in it", "a copy that was cut off"
    handed_over.unlink()
    assert resolved.why_not_ready(run) == "nothing was prepared in it", "a copy without the file"
    monkeypatch.setattr(resolved, "__version__", "9.9")
    assert resolved.why_not_ready(run).startswith("it was prepared by Airlift ")


def test_ranks_that_a_signal_stops_end_with_5_and_go_on_without_another_prepare(
    cluster: Cluster,
) -> None:
    cluster.write(engine={"name": "ddp"}, checkpoint={"every": 1000, "keep": 1})
    long = ("--set", "steps=3000", "--set", "checkpoint.every=1000")
    prepare(cluster, *long)
    ranks = begin_ranks(cluster, mpich, *long)
    wait_for(lambda: (cluster.output() / "metrics.jsonl").exists() and steps(cluster))
    ranks[1].send_signal(signal.SIGTERM)
    said = [rank.communicate(timeout=300) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [5, 5], said
    assert "stopped by a signal; run the same command again to resume" in said[0][0]
    assert "run the same command" not in said[1][0]
    assert not (cluster.output() / "running").exists()
    done = steps(cluster)[-1]
    again = begin_ranks(cluster, mpich, *long)
    wait_for(lambda: steps(cluster)[-1] > done)
    for rank in again:
        rank.send_signal(signal.SIGTERM)
    resumed = [rank.communicate(timeout=300) for rank in again]
    assert [rank.returncode for rank in again] == [5, 5], resumed
    assert f"resumed from step-{done}" in resumed[0][0]


def test_a_folder_in_which_another_launcher_works_is_refused_on_every_rank(
    cluster: Cluster,
) -> None:
    cluster.write()
    prepare(cluster)
    folder = RunFolder(cluster.output())
    with hold_run_folder(folder, os.environ):
        refused = start_ranks(cluster, mpich)
        assert codes(refused) == [2, 2], refused
        assert all("works in this run folder" in one.stderr for one in refused)
        assert read_failures(folder.logs) == []  # they would be those of the run that trains there
        held = cluster.run("prepare", "tiny.yaml", *SHORT)
        assert held.returncode == 2 and "works in this run folder" in held.stderr


def test_what_the_plan_refuses_ends_all_ranks_with_its_code(cluster: Cluster) -> None:
    cluster.write(batch={"global": 9, "micro": 1})
    prepare(cluster)
    for one in start_ranks(cluster, mpich):
        assert one.returncode == 2 and "batch.global 9 does not divide" in one.stderr, one
        assert "Traceback" not in one.stderr


def test_a_dry_run_of_ranks_checks_once_and_starts_nothing(cluster: Cluster) -> None:
    cluster.write()
    first, second = start_ranks(cluster, mpich, "--dry-run")
    assert (first.returncode, second.returncode, second.stdout) == (0, 0, ""), (first, second)
    assert "dry run: nothing was started" in first.stdout
    assert not cluster.output().exists()


@obeys("runner/training/rank.py", "Choose an --output on a disk that all nodes share.")
def test_a_node_that_does_not_see_the_run_folder_is_named(cluster: Cluster) -> None:
    cluster.write()
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    done = cluster.run("rank", str(cluster.output("local")), "train", **place)
    assert done.returncode == 1, done
    assert f"{platform.node()} does not see {cluster.output('local')}" in done.stderr
    assert not cluster.output("local").exists()
    option = in_it(done.stderr, "--output")
    prepare(cluster, option, str(cluster.output("shared")))
    done = cluster.run("rank", str(cluster.output("shared")), "train", **place)
    assert done.returncode == 0, done
