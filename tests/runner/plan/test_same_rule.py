"""`check`, the launcher and the ranks use one rule; what a refusal says to do is accepted next."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from runner.config.run_config import RunConfig, SlurmConfig
from runner.errors import UsageError
from runner.inputs import resolve
from runner.job import devices
from runner.job.access import disk_needed
from runner.job.devices import GIB, NodeShape
from runner.job.shapes import shape_of
from runner.training.components.device import find_device
from tests.first_job.harness import programs
from tests.runner.conftest import Cluster
from tests.runner.preflight.test_preflight import GPT2, Terminal, terminal

__all__ = ["terminal"]

CARDS = """\
NVIDIA A100-SXM4-80GB, 81920, 8.0, GPU-5d5ba0d6, {}
NVIDIA A100-SXM4-80GB, 81920, 8.0, GPU-77ab, Disabled
"""


# ---- remedies


def is_suggested(setting: str, said: str) -> bool:
    """Whether a refusal's remedy has the key, a colon, and the value among those that follow."""
    key, _, value = setting.partition("=")
    return (
        re.search(rf"\b{re.escape(key)}: [^:]*{re.escape(value)}", said.partition("->")[2])
        is not None
    )


def _fp16(cluster: Cluster) -> None:
    cluster.write(precision="fp16")


def _fp16_of_theirs(cluster: Cluster) -> None:
    (cluster.folder / "ds.json").write_text('{"fp16": {"enabled": true}, "train_batch_size": 8}')
    cluster.write(precision=None, batch=None, engine={"config": "ds.json"})


def _batch(cluster: Cluster) -> None:
    cluster.write(batch={"global": 10, "micro": 2})


def _batch_of_theirs(cluster: Cluster) -> None:
    (cluster.folder / "ds.json").write_text(
        '{"train_batch_size": 9, "train_micro_batch_size_per_gpu": 2}'
    )
    cluster.write(batch=None, engine={"config": "ds.json"})


def _length(cluster: Cluster) -> None:
    cluster.write(sequence_length=129)


def _task(cluster: Cluster) -> None:
    cluster.write(model=GPT2)


def _encoder(cluster: Cluster) -> None:
    cluster.write(task="causal-lm")


def _memory(cluster: Cluster) -> None:
    cluster.write(engine={"name": "ddp"})


def _memory_of_an_optimizer_for_ddp(cluster: Cluster) -> None:
    cluster.write(engine={"name": "ddp"}, optimizer={"name": "adafactor"})


REFUSED: dict[str, tuple[Callable[[Cluster], None], list[str]]] = {
    "fp16 on a CPU": (_fp16, ["precision=bf16", "precision=fp32", "precision=auto"]),
    "fp16 of a ds_config.json": (
        _fp16_of_theirs,
        ["precision=bf16", "precision=fp32", "precision=auto"],
    ),
    "a batch": (_batch, ["batch.global=8", "batch.global=12", "batch.micro=1"]),
    "a batch of a ds_config.json": (_batch_of_theirs, ["batch.global=8", "batch.global=12"]),
    "a length": (_length, ["sequence_length=128"]),
    "a task": (_task, ["task=causal-lm"]),
    "an encoder": (_encoder, ["task=masked-lm"]),
    "too little memory": (_memory, ["engine={name: deepspeed, zero: 3}"]),
    "an optimizer of ddp": (
        _memory_of_an_optimizer_for_ddp,
        ["engine={name: deepspeed, zero: 3}", "optimizer.name=adamw"],
    ),
}
TOGETHER = ("an optimizer of ddp",)  # all that is said has to be set


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_refusal_of_check_says_to_set_is_accepted_next(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    make, expected = REFUSED[case]
    make(terminal.cluster)
    ranks = "2"
    if "memory" in case or case in TOGETHER:
        # MB; each of 4 ranks has less than the whole state of the tiny model.
        monkeypatch.setenv("SLURM_MEM_PER_NODE", "4")
        ranks = "4"
    said = terminal.refused("check", "tiny.yaml", "--processes", ranks)
    assert all(is_suggested(setting, said) for setting in expected), said
    if 'Write "auto"' in said:
        text = (terminal.cluster.folder / "ds.json").read_text()
        for key in ("train_batch_size", "enabled"):
            if key in said:
                text = re.sub(rf'("{key}"): [^,}}]+', r'\1: "auto"', text)
        (terminal.cluster.folder / "ds.json").write_text(text)
    tries = [expected] if case in TOGETHER else [[setting] for setting in expected]
    for settings in tries:
        sets = [word for setting in settings for word in ("--set", setting)]
        for command in (("check", "tiny.yaml"), ("train", "tiny.yaml", "--dry-run")):
            code, out, err = terminal.run(*command, "--processes", ranks, *sets)
            assert code == 0, (settings, command, out, err)


def test_fewer_checkpoints_are_advised_only_where_that_is_enough(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    def free(number: int) -> None:
        monkeypatch.setattr(
            shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 0, number)
        )

    config = RunConfig.load(terminal.cluster.write())
    shape = shape_of(config, resolve(config, terminal.cluster.bundle).model)
    least = disk_needed(replace(config, checkpoint=replace(config.checkpoint, keep=1)), shape)
    assert least < disk_needed(config, shape)
    free(least)
    assert "--set checkpoint.keep=1" in terminal.refused("check", "tiny.yaml", code=5)
    assert terminal.run("check", "tiny.yaml", "--set", "checkpoint.keep=1")[0] == 0
    free(least - 1)
    said = terminal.refused("check", "tiny.yaml", code=5)
    assert "keep fewer" not in said and "(--set checkpoint.keep=1 needs " in said


# ---- slices


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """A node whose nvidia-smi gives set answers, with a torch that is not for CPUs."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setitem(
        devices.ACCELERATORS, "GPU", (*devices.ACCELERATORS["GPU"][:2], (str(folder),))
    )
    monkeypatch.setattr(devices, "_torch_for_cpus", lambda: "")

    def answer(listing: str) -> None:
        programs(folder, **{"nvidia-smi": f"cat <<'END'\n{listing}END"})

    return answer


@pytest.mark.parametrize(
    ("visible", "gigabytes"),
    [("MIG-c7384736", 0), (None, 0), ("0", 0), ("GPU-77ab", 80), ("GPU-77", 80), ("1", 80)],
)
def test_a_slice_of_a_gpu_is_not_taken_for_all_of_it(
    driver: Callable[[str], None], visible: str | None, gigabytes: int
) -> None:
    """The ranks find out what it has."""
    driver(CARDS.format("Enabled"))
    device = devices.here(1, {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    assert (device.memory if device else 0) == gigabytes * GIB


def test_a_slice_that_slurm_names_is_known() -> None:
    device = devices.of_job(SlurmConfig(options={"gres": "gpu:1g.10gb:1"}), [], 1)
    assert device is not None and (device.memory, device.has_bf16) == (10 * GIB, True)


# ---- accelerators that were asked for


ASKED: dict[str, tuple[dict[str, Any], dict[str, str], str]] = {
    "Slurm's GPUs": ({}, {"SLURM_GPUS_ON_NODE": "4"}, "Slurm has given this job 4 GPUs"),
    "an Ascend NPU": ({}, {"ASCEND_RT_VISIBLE_DEVICES": "0,1"}, "ASCEND_RT_VISIBLE_DEVICES=0,1"),
    "a ROCm GPU": ({}, {"HIP_VISIBLE_DEVICES": "0"}, "HIP_VISIBLE_DEVICES=0"),
    "an XPU": ({}, {"ZE_AFFINITY_MASK": "0.0"}, "ZE_AFFINITY_MASK=0.0"),
    "an MLU": ({}, {"MLU_VISIBLE_DEVICES": "0"}, "MLU_VISIBLE_DEVICES=0"),
    "GPUs of the run file": (
        {"gpus_per_node": 4},
        {"SLURM_JOB_ID": "1"},
        "asks for 4 GPUs per node",
    ),
    "a gres of another name": (
        {"options": {"gres": "dcu:4"}},
        {"SLURM_JOB_ID": "1"},
        "slurm.options gres: dcu",
    ),
    "GPUs by option": (
        {"options": {"gpus-per-task": 1}},
        {"SLURM_JOB_ID": "1"},
        "slurm.options gpus-per-task",
    ),
}


@pytest.mark.parametrize("case", ASKED)
def test_an_accelerator_that_was_asked_for_is_never_a_cpu_in_silence(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm, environ, words = ASKED[case]
    config = SlurmConfig(**slurm)
    monkeypatch.setitem(devices.ACCELERATORS, "GPU", (*devices.ACCELERATORS["GPU"][:2], ()))
    with pytest.raises(UsageError, match="cannot use it") as launcher:
        devices.notes(config, 1, environ, own_torch=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in [n for n in os.environ if n.startswith("SLURM_")] + ["CUDA_VISIBLE_DEVICES"]:
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="cannot use it") as rank:
        find_device(0, 1, config)
    for said in map(str, (launcher.value, rank.value)):
        assert words in said and "export CUDA_VISIBLE_DEVICES= (in slurm.setup for a job)" in said
    hidden = {**environ, "CUDA_VISIBLE_DEVICES": ""}
    (line,) = devices.notes(config, 1, hidden, own_torch=False)
    assert words in line and line.endswith("hides them: training is on the CPU")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert find_device(0, 1, config)[1].kind == "cpu"


def test_outside_a_job_the_slurm_section_asks_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(devices.ACCELERATORS, "GPU", (*devices.ACCELERATORS["GPU"][:2], ()))
    assert devices.notes(SlurmConfig(gpus_per_node=4), 2, {}) == []


@pytest.mark.parametrize("gres", ["npu:8", "gres/mlu:4", "gpu:a800:1,hpu:8", "TPU:1"])
def test_a_job_that_asks_for_what_no_rank_can_use_is_refused_where_it_is_submitted(
    terminal: Terminal, gres: str
) -> None:
    terminal.cluster.write(slurm={"options": {"gres": gres}})
    for command in ("check", "submit"):
        said = terminal.refused(command, "tiny.yaml")
        assert "cannot be used" in said and "slurm.gpus_per_node" in said


def test_a_gpu_of_another_name_is_not_a_cpu() -> None:
    nodes = [NodeShape(64, 0, 64 * GIB)]
    assert devices.of_job(SlurmConfig(options={"gres": "dcu:4"}), nodes, 4) is None
    assert devices.notes_of_job(SlurmConfig(options={"gres": "dcu:4"}), 4) == []
    assert devices.notes_of_job(SlurmConfig(options={"gres": "nvme:1,craynetwork:1"}), 1) == []


def test_more_gpus_than_ranks_is_said(driver: Callable[[str], None]) -> None:
    driver(CARDS.format("Disabled"))
    assert devices.notes(SlurmConfig(), 2, {}) == []
    (line,) = devices.notes(SlurmConfig(), 1, {})
    assert (
        line.startswith("2 GPUs are here and 1 rank on each node: 1 stay idle")
        and "--processes 2" in line
    )
    assert devices.notes(SlurmConfig(), 1, {"CUDA_VISIBLE_DEVICES": "1"}) == []
    (line,) = devices.notes_of_job(SlurmConfig(options={"gres": "gpu:4"}), 1)
    assert "4 GPUs are asked for and 1 rank on each node: 3 stay idle" in line
    job = {"SLURM_JOB_ID": "1", "SLURM_GPUS_ON_NODE": "2"}
    (line,) = devices.notes(SlurmConfig(gpus_per_node=4), 2, job)
    assert line == "the run file asks for 4 GPUs per node (slurm.gpus_per_node); this node has 2"


def test_a_torch_for_cpus_is_said_or_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(devices, "_torch_for_cpus", lambda: "2.9.1+cpu")
    monkeypatch.setitem(
        devices.ACCELERATORS, "GPU", (*devices.ACCELERATORS["GPU"][:2], (str(tmp_path),))
    )
    with pytest.raises(
        UsageError, match=r"given this job 2 GPUs .* torch 2\.9\.1\+cpu is for CPUs only"
    ):
        devices.notes(SlurmConfig(), 2, {"SLURM_GPUS_ON_NODE": "2"})
    assert (
        "which are not used: torch 2.9.1+cpu is for CPUs only"
        in devices.notes(SlurmConfig(), 2, {})[-1]
    )
    assert devices.torch_without_gpus(SlurmConfig(gpus_per_node=2)) == "2.9.1+cpu"
    assert devices.torch_without_gpus(SlurmConfig()) == ""


def test_more_ranks_than_gpus_are_no_fault_on_cpus_or_where_the_job_shares_them() -> None:
    on_cpus = SlurmConfig(
        gpus_per_node=2, tasks_per_node=4, setup=("export CUDA_VISIBLE_DEVICES=''",)
    )
    assert devices.notes_of_job(on_cpus, 4) == []
    for_the_whole_job = SlurmConfig(options={"gpus": 2}, nodes=2)
    assert devices.notes_of_job(for_the_whole_job, 4) == []
