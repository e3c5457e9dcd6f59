"""`check`, the launcher and the ranks use one rule; what a refusal says to do is accepted next."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from runner.config.job_config import SlurmConfig
from runner.from_stage import UsageError
from runner.job import devices
from runner.job.devices import GIB
from runner.training.components.device import find_device
from tests.first_job.harness import programs
from tests.runner.job.test_preflight import Terminal, terminal

__all__ = ["terminal"]

CARDS = """\
NVIDIA A100-SXM4-80GB, 81920, 8.0, GPU-5d5ba0d6, {}
NVIDIA A100-SXM4-80GB, 81920, 8.0, GPU-77ab, Disabled
"""


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
        assert words in said and "export CUDA_VISIBLE_DEVICES= (for a job: one line more" in said
    hidden = {**environ, "CUDA_VISIBLE_DEVICES": ""}
    (line,) = devices.notes(config, 1, hidden, own_torch=False)
    assert words in line and line.endswith("hides them: training is on the CPU")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert find_device(0, 1, config)[1].kind == "cpu"


@pytest.mark.parametrize("gres", ["npu:8", "gres/mlu:4", "gpu:a800:1,hpu:8", "TPU:1"])
def test_a_job_that_asks_for_what_no_rank_can_use_is_refused_where_it_is_submitted(
    terminal: Terminal, gres: str
) -> None:
    terminal.cluster.write(slurm={"options": {"gres": gres}})
    for command in ("check", "submit"):
        said = terminal.refused(command, "tiny.yaml")
        assert "cannot be used" in said and "slurm.gpus_per_node" in said


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
