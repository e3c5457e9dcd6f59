"""What `runner submit` decides by itself. That Slurm accepts or refuses it is in tests/site."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runner.config.job_config import SlurmConfig
from runner.from_stage import StageError, UsageError
from runner.job import submit
from runner.job.partition import NodeShape, Partition, ask_partition, count_gpus, types_of_gpus
from runner.run_folder.layout import RunFolder
from runner.run_folder.run_lock import hold_run_folder
from runner.slurm.script import SbatchRequest
from tests.first_job.harness import programs
from tests.runner.slurm.test_script import CPU

ANY = Partition("default")


@pytest.mark.parametrize(
    ("gres", "gpus", "types"),
    [
        ("(null)", 0, ()),
        ("", 0, ()),
        ("gpu:4", 4, ()),
        ("gpu", 1, ()),
        ("gpu:a800:4(S:0-1)", 4, ("a800",)),
        ("gpu:a100-sxm4-80gb:8,nvme:1", 8, ("a100-sxm4-80gb",)),
        ("gpu:v100:2(S:0,2),gpu:t4:1", 3, ("v100", "t4")),
        ("gpu:1g.10gb:7", 7, ("1g.10gb",)),
        ("craynetwork:4", 0, ()),
    ],
)
def test_gpus_are_counted_in_every_notation(gres: str, gpus: int, types: tuple[str, ...]) -> None:
    assert (count_gpus(gres), types_of_gpus(gres)) == (gpus, types)


@pytest.mark.parametrize(
    ("nodes", "ranks", "gpus", "share", "why"),
    [
        ([(64, 4)], 4, 4, 16, "64 CPUs and 4 GPUs"),
        ([(64, 4)], 1, 1, 16, "64 CPUs and 4 GPUs"),
        ([(64, 4), (32, 4)], 4, 4, 8, "32 CPUs and 4 GPUs"),
        ([(64, 8), (48, 4)], 4, 4, 8, "64 CPUs and 8 GPUs"),
        ([(8, 0), (64, 4)], 4, 4, 16, "64 CPUs and 4 GPUs"),
        ([(8, 8)], 8, 4, 1, "8 CPUs and 8 GPUs"),
        ([(3, 0), (9, 0), (4, 0)], 4, 0, 1, "4 CPUs"),
        ([(9, 0), (12, 1)], 4, 0, 2, "9 CPUs"),
        ([(3, 4), (64, 3)], 4, 4, None, ""),
    ],
)
def test_a_rank_gets_the_share_of_cpus_of_the_smallest_node_with_enough_gpus(
    nodes: list[tuple[int, int]], ranks: int, gpus: int, share: int | None, why: str
) -> None:
    reason = why and f"A rank's share: the smallest node has {why}."
    shapes = [NodeShape(*node) for node in nodes]
    assert submit.cpus_per_task(shapes, ranks=ranks, gpus=gpus) == (share, reason)


BY_CPU = "DefMemPerCPU = 1000"


@pytest.mark.parametrize(
    ("slurm", "partition", "config", "memory", "why"),
    [
        ({}, "", BY_CPU, 8000, "DefMemPerCPU of slurm.conf, 1000 MB x 8 CPUs; slurm.options asks"),
        ({"options": {"cpus-per-task": 2}}, "DefMemPerCPU=500", BY_CPU, 1000, "of partition batch"),
        ({"options": {"cpus-per-task": 2}}, "OverSubscribe=EXCLUSIVE", BY_CPU, 8000, "x 8 CPUs"),
        ({"options": {"cpus_per_task": 2, "exclusive": True}}, "", BY_CPU, 8000, "x 8 CPUs"),
        ({"options": {"cpus-per-gpu": 2}}, "", BY_CPU, 0, ""),
        ({}, "DefMemPerNode=3000", BY_CPU, 3000, "DefMemPerNode of partition batch, 3000 MB;"),
        ({"gpus_per_node": 2}, "JobDefaults=DefMemPerGPU=700", BY_CPU, 1400, "700 MB x 2 GPUs"),
        ({"options": {"gpus": 2}}, "", BY_CPU, 0, ""),
        ({}, "DefMemPerNode=UNLIMITED", "DefMemPerNode = UNLIMITED", 0, ""),
        ({}, "DefMemPerCPU=9223372036854775807", BY_CPU, 0, ""),
        ({"options": {"mem": "2G"}}, "", BY_CPU, 2048, ""),
        ({"options": {"mem": 0}}, "", BY_CPU, 0, ""),
        ({"options": {"mem-per-cpu": 100}}, "", BY_CPU, 800, ""),
        ({"gpus_per_node": 2, "options": {"mem-per-gpu": "1G"}}, "", BY_CPU, 2048, ""),
    ],
)
def test_a_job_that_asks_for_no_memory_has_slurms_default(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    slurm: dict[str, Any],
    partition: str,
    config: str,
    memory: int,
    why: str,
) -> None:
    shown = f'[ $2 = partition ] && echo "PartitionName=batch {partition}" || echo "{config}"'
    selects = "echo SelectTypeParameters = CR_CORE"
    programs(tmp_path, sinfo="echo 'batch*|8|64000|gpu:2|infinite'")
    monkeypatch.setenv("PATH", programs(tmp_path, scontrol=f"{shown}\n{selects}_MEMORY"))
    assert ask_partition(None) == Partition("batch", (NodeShape(8, 2, 64000 * 2**20),), "infinite")
    found = submit.memory_on_node(SlurmConfig(**slurm), ask_partition(None), {})
    assert found[0] == memory * 2**20 and why in found[1] and bool(why) == bool(found[1])
    from_shell = {"SBATCH_MEM_PER_NODE": "5"}
    own = {"mem", "mem-per-cpu", "mem-per-gpu"} & slurm.get("options", {}).keys()
    also = submit.memory_on_node(SlurmConfig(**slurm), ask_partition(None), from_shell)
    assert also == (found if own else (5 * 2**20, ""))
    programs(tmp_path, scontrol=f"{shown}\n{selects}")  # no job is kept to a share of it
    free = submit.memory_on_node(SlurmConfig(**slurm), ask_partition(None), {})
    assert free == (found if own else (0, ""))


def test_a_job_that_only_sbatch_itself_refuses_leaves_no_run_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster_of(tmp_path, monkeypatch, "")
    refuses = '[ "$1" = --test-only ] && exit 0; echo "sbatch: error: over quota" >&2; exit 1'
    programs(tmp_path, sbatch=refuses)
    wanted = dataclasses.replace(CPU, run_folder=tmp_path / "run", partition=None, time=None)
    with pytest.raises(UsageError, match="over quota"):
        submit.submit(wanted, ANY)
    assert not wanted.run_folder.exists()
    wanted.run_folder.mkdir()
    (wanted.run_folder / "config.yaml").write_text("an earlier run\n")
    with pytest.raises(UsageError, match="over quota"):
        submit.submit(wanted, ANY)
    assert (wanted.run_folder / "config.yaml").exists()


def cluster_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    """A partition of two nodes, and an sbatch that says something with --test-only."""
    path = programs(
        tmp_path,
        sbatch=f'[ "$1" = --test-only ] && {{ echo "{said}" >&2; exit 1; }}\necho 17',
        sinfo="for n in 1 2; do echo 'batch*|8|64000|(null)|infinite'; done",
        squeue="exit 0",
    )
    monkeypatch.setenv("PATH", path)


def test_drained_nodes_are_a_warning_because_sbatch_accepts_and_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "Required node not available (down, drained or reserved)"
    cluster_of(tmp_path, monkeypatch, f"allocation failure: {words}")
    wanted = dataclasses.replace(CPU, run_folder=tmp_path / "run", partition=None, time=None)
    answer = submit.ask_slurm(wanted, ask_partition(None))
    assert "accepted, to wait" in answer.line
    assert words in answer.warning and "sinfo -R" in answer.warning
    assert submit.submit(wanted, ANY) == 17
    assert f"warning: allocation failure: {words}" in capsys.readouterr().err
    assert (tmp_path / "run" / "submitted").read_text() == "17\n"


# ---- exactly one job, where sbatch's answer is lost; with the real Slurm in tests/site

Says = Callable[..., SbatchRequest]
TIMED_OUT = 'echo "sbatch: error: Socket timed out on send/recv operation" >&2; exit 1'


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Says:
    """A cluster whose commands run these lines; each sbatch but a test is counted in `sent`."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(submit, "_SETTLED_AFTER_S", 1.0)

    def says(**bodies: str) -> SbatchRequest:
        if "sbatch" in bodies:
            counted = f'[ "$1" = --test-only ] && exit 0; echo >>{tmp_path}/sent; '
            bodies["sbatch"] = counted + bodies["sbatch"]
        programs(tmp_path, **bodies)
        return dataclasses.replace(CPU, run_folder=tmp_path / "run", partition=None, time=None)

    says(sinfo="exit 1", squeue="exit 0", sacct="exit 0")
    return says


def sent(tmp_path: Path) -> int:
    """How often a job was sent to Slurm."""
    return len((tmp_path / "sent").read_text().splitlines())


def test_a_lost_answer_is_looked_for_in_the_queue_and_in_the_accounts_before_anything_is_sent_again(
    tmp_path: Path, slurm: Says
) -> None:
    wanted = slurm(sbatch=TIMED_OUT)
    with pytest.raises(StageError, match="Socket timed out") as lost:
        submit.submit(wanted, ANY)
    assert lost.value.exit_code == 5 and wanted.script.exists() and wanted.log.parent.is_dir()
    unknown = "echo 'sacct: error: Problem talking to the database: Connection refused' >&2; exit 1"
    slurm(sacct=unknown)
    with pytest.raises(StageError, match="Connection refused") as lost:
        submit.submit(wanted, ANY)
    assert (lost.value.exit_code, sent(tmp_path)) == (5, 1)
    slurm(sacct=f"echo '17_0|2999-01-01T00:00:00|sbatch --parsable {wanted.script}'")
    assert submit.submit(wanted, ANY) == 17
    assert sent(tmp_path) == 1 and not RunFolder(wanted.run_folder).intent.exists()


@pytest.mark.parametrize(
    ("answer", "words"), [(TIMED_OUT, "Socket timed out"), ("echo", "printed no job number")]
)
def test_an_earlier_job_of_the_same_folder_is_not_taken_for_the_one_whose_answer_is_lost(
    tmp_path: Path, slurm: Says, answer: str, words: str
) -> None:
    wanted = slurm(sbatch=answer)
    over = f"16|COMPLETED|None|n1|1:00|0:00|N/A|{wanted.script}"
    old = f"15|2020-01-01T00:00:00|sbatch --parsable {wanted.script}"
    slurm(squeue=f"echo '{over}'", sacct=f"echo '{old}'")
    with pytest.raises(StageError, match=words):
        submit.submit(wanted, ANY)
    slurm(sbatch="echo 17")
    assert (submit.submit(wanted, ANY), sent(tmp_path)) == (17, 2)


def test_a_changed_request_does_not_take_the_job_of_another_whose_answer_was_lost(
    tmp_path: Path, slurm: Says
) -> None:
    wanted = slurm(sbatch=TIMED_OUT)
    with pytest.raises(StageError, match="Socket timed out"):
        submit.submit(wanted, ANY)
    slurm(squeue=f"echo '17|PENDING|None||0:00|1:00|N/A|{wanted.script}'")
    changed = dataclasses.replace(wanted, nodes=2)
    with pytest.raises(UsageError, match=r"job 17 .pending. already writes"):
        submit.submit(changed, ANY)
    assert (sent(tmp_path), (wanted.run_folder / "submitted").read_text()) == (1, "17\n")
    slurm(sbatch="echo 18", squeue="exit 0")
    assert submit.submit(changed, ANY) == 18


def test_one_process_at_a_time_submits_a_run(tmp_path: Path, slurm: Says) -> None:
    wanted = slurm(sbatch="echo 17")
    folder = RunFolder(wanted.run_folder)
    folder.make()
    with hold_run_folder(folder, {}, to_submit=True):
        named = f"process {os.getpid()} on .* submits this run"
        with pytest.raises(UsageError, match=named):
            submit.submit(wanted, ANY)
        with hold_run_folder(folder, {}):
            pass  # another lock than that of those who train
    assert (submit.submit(wanted, ANY), sent(tmp_path)) == (17, 1)
