"""What `check` says of the host's memory at load."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.config.run_config import RunConfig
from runner.job.load_memory import peak_at_load
from runner.job.plan import TrainingPlan
from runner.job.shapes import Device, ModelShape

GIB = 2**30
GPU = Device("cuda", "H100", 80 * GIB, True, True, 200 * GIB)
LLAMA_70B = ModelShape(70_000_000_000, 8192, 8192, 80, 32_000)
RUN_FILE = "format: 1\ntask: causal-lm\nmodel: {asset: llama}\ndataset: {asset: text}\n"


def peak(folder: Path, device: Device, zero: int, *overrides: str, offload: str = "none") -> int:
    (folder / "run.yaml").write_text(RUN_FILE)
    config = RunConfig.load(folder / "run.yaml", ["precision=bf16", *overrides])
    plan = TrainingPlan(512, 16, 32, 1, 2, "bf16", zero, (), offload)
    return peak_at_load(config, LLAMA_70B, plan, device, 8)


def test_70b_on_eight_gpus_takes_one_weight_of_the_host(tmp_path: Path) -> None:
    """It was 4 bytes x parameters x ranks: 2.2 TB, and the kernel ended the job in silence."""
    assert peak(tmp_path, GPU, 3) < 2 * GIB


@pytest.mark.parametrize(
    ("zero", "overrides", "bytes_each"),
    [
        (3, ["engine.name=fsdp"], 4 * 8 / 16),
        (3, ["engine.name=deepspeed"], 2 * 8 / 16),
        (1, ["engine.name=deepspeed"], 2 * 8),
        (0, ["engine.name=ddp"], 4 * 8),
        (3, ["engine.name=deepspeed", "model.init=scratch"], 4),
    ],
)
def test_on_cpus_a_node_holds_what_its_ranks_keep(
    tmp_path: Path, zero: int, overrides: list[str], bytes_each: float
) -> None:
    found = peak(tmp_path, Device.cpu(64 * GIB), zero, *overrides)
    kept = bytes_each * LLAMA_70B.num_parameters
    assert kept < found < kept + 16 * GIB
