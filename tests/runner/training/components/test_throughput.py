"""The speed in metrics.jsonl. A loss that is not finite ends the run and spoils nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from runner.job.devices import KINDS, peak_flops
from runner.job.shapes import ModelShape
from runner.training.reporting import StepClock, flops_per_prediction, flops_per_token
from tests.remedies.obeyed import in_it, obeys
from tests.runner.conftest import Cluster


@pytest.fixture(scope="module")
def exploded(shared_cluster: Cluster) -> tuple[Path, str]:
    """A run with a learning rate that no model survives: its folder, and the command's output."""
    shared_cluster.write(
        "exploded", steps=50, engine={"zero": 1}, optimizer={"lr": 1e30, "clip": 0},
        checkpoint={"every": 1, "keep": 9},
        schedule={"name": "constant", "warmup": 0},
    )  # fmt: skip
    done = shared_cluster.run("train", "exploded.yaml", "--processes", "2")
    assert done.returncode == 1, done.stderr
    return shared_cluster.output("exploded"), done.stderr


def logged(folder: Path) -> list[dict[str, Any]]:
    """The lines of the steps."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if "loss" in line]


def test_a_loss_that_is_no_number_ends_the_run_and_nothing_after_it_is_saved(
    exploded: tuple[Path, str],
) -> None:
    folder, said = exploded
    *sound, last = logged(folder)
    assert last["loss"] is None and all(line["loss"] is not None for line in sound)
    assert f"error: step {last['step']}: the loss is" in said and "on ranks 0, 1" in said
    assert "Lower optimizer.lr" in said and "Traceback" not in said
    checkpoints = sorted((folder / "checkpoints").glob("step-*"))
    assert [path.name for path in checkpoints] == [f"step-{line['step']}" for line in sound]
    for path in checkpoints:
        listed = json.loads((path / "files.json").read_text())["files"]
        assert all((path / one["path"]).stat().st_size == one["size"] for one in listed)
    assert not (folder / "model").exists()
    recorded = json.loads((folder / "environment.json").read_text())
    assert recorded["num_steps"] == 50 and recorded["pid"] > 0


@obeys("runner/training/reporting.py", "Lower optimizer.lr, set precision: bf16 or fp32")
def test_a_validation_loss_that_is_no_number_ends_the_run_before_its_step_is_saved(
    shared_cluster: Cluster,
) -> None:
    shared_cluster.write(
        "lost", steps=5, engine={"name": "ddp"}, optimizer={"lr": 1e9, "clip": 0},
        evaluation={"every": 1},
        checkpoint={"every": 1, "best": True}, schedule={"name": "constant", "warmup": 0},
    )  # fmt: skip
    done = shared_cluster.run("train", "lost.yaml", "--processes", "1")
    assert done.returncode == 1, done.stderr
    assert "error: step 1: the validation loss is nan. Nothing was saved after it" in done.stderr
    assert "Traceback" not in done.stderr
    checkpoints = shared_cluster.output("lost") / "checkpoints"
    assert not list(checkpoints.glob("step-*")) and not (checkpoints / "best.json").exists()
    assert in_it(done.stderr, "Lower optimizer.lr.*with that change: it begins at step 0")
    shared_cluster.trained("lost", "--set", "optimizer.lr=0.001", processes=1)


@pytest.mark.parametrize(
    ("name", "precision", "peak"),
    [
        ("NVIDIA A800-SXM4-80GB", "bf16", 312e12),
        ("NVIDIA A100-PCIE-40GB", "fp32", 19.5e12),
        ("NVIDIA A10", "fp16", 125e12),
        ("NVIDIA A10G", "fp16", 70e12),
        ("NVIDIA A40", "bf16", 149.7e12),
        ("Tesla V100-SXM2-16GB", "fp16", 125e12),
        ("Tesla V100-PCIE-16GB", "fp16", 112e12),
        ("Tesla T4", "fp16", 65e12),
        ("NVIDIA H100 80GB HBM3", "bf16", 989e12),
        ("NVIDIA H100 PCIe", "bf16", 756e12),
        ("NVIDIA H200", "bf16", 989e12),
        ("NVIDIA H20", "bf16", 148e12),
        ("NVIDIA L40S", "bf16", 362e12),
        ("NVIDIA L4", "bf16", 121e12),
        ("TITAN RTX", "fp16", 130e12),
        ("NVIDIA H200 NVL", "bf16", 835e12),
        ("NVIDIA H800 PCIe", "bf16", 756e12),
        ("NVIDIA GB200", "bf16", 2500e12),
        ("NVIDIA RTX A6000", "bf16", 154.8e12),
        ("NVIDIA RTX 6000 Ada Generation", "fp32", 91.1e12),
        ("AMD Instinct MI250X", "bf16", 191.5e12),
        ("AMD Instinct MI250", "fp32", 45.3e12),
        ("AMD Instinct MI300X", "bf16", 1307e12),
        ("AMD Instinct MI300A", "bf16", 980.6e12),
        ("Quadro RTX 6000", "fp16", None),
        ("NVIDIA GeForce GTX 1080", "fp16", None),
        ("CPU", "fp32", None),
    ],
)
def test_the_peak_is_that_of_the_device_and_of_no_other_with_a_name_like_it(
    name: str, precision: str, peak: float
) -> None:
    assert peak_flops(name, precision) == peak


def test_the_measures_of_a_step_are_of_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.monotonic", iter([100.0, 104.0, 200.0, 202.0]).__next__)
    clock, found = StepClock(token_flops=2.0, peak=8.0, prediction_flops=10.0), list[Any]()
    for samples, tokens, waited in ((8, 256, 1.0), (4, 128, 0.0)):
        clock.begin()
        found.append(clock.measures(samples, tokens, waited, 3.0))
    assert 0 < found[0].pop("first_step_s") < 1e6
    assert found == [
        {
            "tokens": 256, "tokens_per_s": 64.0, "samples_per_s": 2.0, "step_s": 4.0,
            "data_wait": 0.25, "mfu": (2 * 256 + 10 * 3) / 4 / 8,
        },
        {
            "tokens": 128, "tokens_per_s": 64.0, "samples_per_s": 2.0, "step_s": 2.0,
            "data_wait": 0.0, "mfu": (2 * 128 + 10 * 3) / 2 / 8,
        },
    ]  # fmt: skip


def test_a_token_costs_six_flops_a_parameter_and_attention() -> None:
    gpt2 = ModelShape(124_439_808, 1024, 768, 12, 50257)
    for each, every in ((6, True), (4, False)):
        of_token = each * 124_439_808 + 12 * 12 * 768 * 1024
        assert flops_per_token(gpt2, 1024, all_weights=every) == of_token
        assert flops_per_prediction(gpt2, all_weights=every) == each * 50257 * 768
    assert all(low >= full >= 0 for _, _, low, full in KINDS.values())
