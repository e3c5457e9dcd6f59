"""Whole runs by the command: QLoRA, a device that is full."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.runner.conftest import Cluster, metrics


def test_qlora_learns_and_its_adapter_is_merged(
    device: torch.device, tmp_path: Path, twins_bundle: Path
) -> None:
    cluster = Cluster(tmp_path, twins_bundle)
    cluster.write(
        "qlora", task="causal-lm", model={"asset": "tiny-chat"}, steps=12,
        lora={"rank": 8, "alpha": 32, "merge": True}, optimizer={"lr": 0.01},
        dataset={"asset": "reference", "limit": {"train": 200, "validation": 24}},
        quantization={"bits": 4, "type": "nf4"}, engine={"name": "ddp"}, precision="bf16",
        evaluation={"every": 6},
    )  # fmt: skip
    output = cluster.trained("qlora", processes=1)
    losses = [loss for _, loss in metrics(output, "validation_loss")]
    assert losses[-1] < losses[0]
    assert (output / "model" / "adapter_model.safetensors").exists() or (
        output / "model" / "model.safetensors"
    ).exists()


def test_a_device_that_is_full_is_explained(cuda: torch.device, cluster: Cluster) -> None:
    free, _ = torch.cuda.mem_get_info()
    held = torch.empty(max(0, free - 900 * 2**20), dtype=torch.uint8, device=cuda)
    cluster.write(sequence_length=128, batch={"global": 4096, "micro": 4096}, precision="fp32")
    done = cluster.run("train", "tiny.yaml", "--processes", "1")
    del held
    assert (done.returncode, "Traceback" in done.stderr) == (5, False), done.stderr
    assert "out of memory on " in done.stderr  # at a step, or before the first one
