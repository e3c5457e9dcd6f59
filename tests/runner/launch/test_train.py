"""`runner train` with real ranks: it learns, it writes its files, all ZeRO stages do the same."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-untyped]
    EventAccumulator,
)
from transformers import AutoModelForMaskedLM, AutoTokenizer

from tests.runner.conftest import Cluster, metrics

STAGES = (0, 1, 2, 3)


@pytest.fixture(scope="module")
def stages(trained_at: Callable[[int], Path]) -> dict[int, Path]:
    """The same run at each ZeRO stage."""
    return {stage: trained_at(stage) for stage in STAGES}


def test_the_loss_falls(stages: dict[int, Path]) -> None:
    losses = [loss for _, loss in metrics(stages[0])]
    assert len(losses) == 8
    assert losses[0] == pytest.approx(math.log(1024), rel=0.05)
    # One batch of eight differs by 0.2 from the next; the validation split does not. Eleven seeds:
    # 0.52 to 0.67 lower.
    assert metrics(stages[0], "validation_loss")[-1][1] < losses[0] - 0.3


@pytest.mark.parametrize("key", ["loss", "grad_norm", "lr", "validation_loss"])
@pytest.mark.parametrize("stage", STAGES[1:])
def test_every_zero_stage_does_what_stage_0_does(
    stages: dict[int, Path], stage: int, key: str
) -> None:
    expected, found = metrics(stages[0], key), metrics(stages[stage], key)
    assert [step for step, _ in found] == [step for step, _ in expected]
    assert [value for _, value in found] == pytest.approx(
        [value for _, value in expected], rel=1e-4
    )


@pytest.mark.parametrize("stage", STAGES)
def test_the_exported_model_gives_the_validation_loss_of_the_run(
    stages: dict[int, Path], stage: int
) -> None:
    folder = stages[stage] / "model"
    model, info = AutoModelForMaskedLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    reference = load_file(stages[0] / "model" / "model.safetensors")
    exported = load_file(folder / "model.safetensors")
    assert exported.keys() == reference.keys()
    for name, tensor in reference.items():
        assert exported[name].numpy() == pytest.approx(tensor.numpy(), abs=1e-4), name
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.mask_token == "[MASK]"


def test_each_step_is_told_with_all_its_measures(stages: dict[int, Path]) -> None:
    lines = [json.loads(line) for line in (stages[1] / "metrics.jsonl").read_text().splitlines()]
    (first, *steps) = [line for line in lines if "loss" in line]
    measured = {"epoch", "loss", "lr", "grad_norm", "step_s", "data_wait", "memory_gib"}
    measured |= {"step", "tokens", "tokens_per_s", "samples_per_s"}
    for line in (first, *steps):
        assert line.keys() - {"first_step_s"} == measured and line["tokens"] == 8 * 32
        assert line["tokens_per_s"] * line["step_s"] == pytest.approx(8 * 32)
        assert line["samples_per_s"] * line["step_s"] == pytest.approx(8)
    assert first["first_step_s"] > first["step_s"] and 0 <= first["data_wait"] < 1
    (validation,) = [line for line in lines if "validation_loss" in line]
    assert validation["validation_perplexity"] == pytest.approx(
        math.exp(validation["validation_loss"])
    )


def test_the_run_folder_says_what_ran_where(stages: dict[int, Path], bundle: Path) -> None:
    recorded = json.loads((stages[2] / "environment.json").read_text())
    known = {"world_size": 2, "seed": 42, "device": "CPU", "num_steps": 8, "exported_step": 8}
    known["bundle_id"] = sha256((bundle / "stage.lock").read_bytes()).hexdigest()
    assert {key: recorded[key] for key in known} == known
    assert recorded["versions"].keys() >= {"torch", "deepspeed", "transformers"}
    board = EventAccumulator(str(stages[2] / "tensorboard")).Reload()
    for key in ("loss", "lr", "validation_loss"):
        drawn = [(event.step, event.value) for event in board.Scalars(key)]
        assert drawn == [(step, pytest.approx(value)) for step, value in metrics(stages[2], key)]


def test_a_finished_run_is_told_at_once_and_not_trained_again(
    cluster: Cluster, stages: dict[int, Path]
) -> None:
    finished = cluster.take(stages[2])
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*")}
    done = cluster.run("train", "zero2.yaml", "--processes", "2", "--set", "optimizer.lr=0.5")
    assert done.returncode == 0, done.stderr
    assert f"{finished}: finished already: 8 of 8 steps" in done.stdout
    assert "what has changed since: " in done.stdout and "(now 0.5)" in done.stdout
    # Handed to Slurm it would wait in the queue for nothing.
    submitted = cluster.run("submit", "zero2.yaml")
    assert submitted.returncode == 0 and "nothing was submitted" in submitted.stdout
    checked = cluster.run("check", "zero2.yaml", "--processes", "2")
    assert checked.returncode == 0 and "finished already" in checked.stdout
    assert {path: path.stat().st_mtime_ns for path in finished.rglob("*")} == before
