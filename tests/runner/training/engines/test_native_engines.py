"""Engines with every optimizer and precision they offer: the same steps, exact resume, overflow, a
full disk.

One pair of real ranks does it all, around a small module with a tied weight and a frozen one.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import device, nn
from transformers import GPT2Config, GPT2LMHeadModel

from runner.config.engine import OptimizerConfig
from runner.config.run_config import RunConfig
from runner.from_stage import UsageError
from runner.job.plan import TrainingPlan
from runner.training.components.optimization import make_optimizer
from runner.training.components.process_group import Ranks
from runner.training.engines.native import blocks_of
from runner.training.setup import make_engine
from runner.training.weights import check_batch_norm
from tests.remedies.obeyed import in_it, obeys
from tests.runner.training.engines.conftest import RUN_FILE

CASES = [
    f"{engine}-{optimizer}-fp32" for engine in ("ddp", "fsdp") for optimizer in ("adamw", "lion")
]
CASES += ["zero0-adamw-fp32", "zero1-adamw-bf16", "zero2-adamw-bf16", "zero3-lion-fp32"]
CASES += [
    "ddp-adafactor-fp32",
    "ddp-adamw-fp16",
    "fsdp-adamw-fp16",
    "ddp-adamw-bf16",
    "fsdp-adamw-bf16",
]
CASES += ["ddp-sgd-fp32", "fsdp-sgd-fp32", "zero2-sgd-bf16", "fsdp-plain-fp32"]


@pytest.mark.parametrize("case", CASES)
def test_what_is_loaded_goes_on_as_if_nothing_had_been(results: dict[str, Any], case: str) -> None:
    assert results[case]["same"]
    assert results[case]["resumed"] == results[case]["steps"][3:]


@pytest.mark.parametrize("case", ["adamw-fp32", "lion-fp32", "sgd-fp32"])
def test_sharded_and_whole_weights_take_the_same_steps(results: dict[str, Any], case: str) -> None:
    whole, sharded = results[f"ddp-{case}"]["steps"], results[f"fsdp-{case}"]["steps"]
    for found, expected in zip(sharded, whole, strict=True):
        assert found == pytest.approx(expected, rel=1e-5)
    assert whole[-1][0] < whole[0][0]


def test_ddp_names_weights_that_take_no_part_in_the_loss(tmp_path: Path, ranks: Ranks) -> None:
    """torch names no weight, and not before the second step."""

    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Linear(2, 1), nn.Linear(2, 1)

        def forward(self, rows: Any) -> Any:
            return self.used(rows).sum()

    (tmp_path / "run.yaml").write_text(RUN_FILE)
    config = RunConfig.load(tmp_path / "run.yaml", ["engine.name=ddp"])
    plan = TrainingPlan(8, 1, 1, 1, 1, "fp32", 0, ())
    engine = make_engine(Half(), config, plan, torch.device("cpu"))
    with pytest.raises(UsageError, match=r"2 weights .* idle\.weight, idle\.bias") as refused:
        engine.backward(engine.forward({"rows": torch.ones(3, 2)}), last=True)
    assert "fsdp" in refused.value.remedy


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_an_overflow_on_one_rank_is_one_on_all_and_updates_nothing(
    results: dict[str, Any], engine: str
) -> None:
    steps = results[f"{engine}-adamw-fp16"]["steps"]
    norms = [norm for _, norm in steps]
    assert not math.isfinite(norms[1])
    assert all(math.isfinite(norm) for norm in norms[:1] + norms[2:])
    # The steps after it are those of a run that never had it, in half precision.
    expected = [norm for _, norm in results[f"{engine}-adamw-fp32"]["steps"]]
    assert norms[0] == pytest.approx(expected[0], rel=0.02)


@obeys("runner/training/weights.py", "Set engine: {name: ddp}, or precision: fp32.")
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("engine", ["fsdp", "deepspeed"])
def test_batch_norm_whose_weights_would_be_cast_is_refused(
    tmp_path: Path, engine: str, precision: str
) -> None:
    """Its running means would not move, or torch would refuse it in a step."""
    run_file = tmp_path / "run.yaml"
    run_file.write_text(f"{RUN_FILE}engine: {{name: {engine}}}\n")
    plan = TrainingPlan(8, 2, 8, 2, 2, precision, 3, ())
    module = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    with pytest.raises(UsageError) as caught:
        make_engine(module, RunConfig.load(run_file), plan, device("cpu"))
    assert caught.value.message == (
        f"{run_file}:5: this model has batch norm, which cannot be trained in {precision} with "
        f"{engine}."
    )
    check_batch_norm(module, RunConfig.load(run_file), in_it(caught.value.remedy, "fp32"))
    run_file.write_text(f"{RUN_FILE}{in_it(caught.value.remedy, 'engine: {.*?}')}\n")
    check_batch_norm(module, RunConfig.load(run_file), precision)


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_a_disk_full_for_one_rank_is_full_for_all(results: dict[str, Any], engine: str) -> None:
    said = results[f"full-{engine}"]
    assert all(words.startswith("OSError") for words in said), said
    assert any("File too large" in words for words in said)


@pytest.mark.parametrize(("engine", "rank"), [("zero0", 0), ("zero2", 1)])
def test_a_rank_whose_disk_is_full_comes_to_deepspeeds_barrier_and_says_so(
    results: dict[str, Any], engine: str, rank: int
) -> None:
    said = results[f"full-{engine}"]
    assert said[1 - rank] == "saved" and "Error" in said[rank], said


def test_lion_moves_by_the_sign_of_its_momentum() -> None:
    module = nn.Linear(1, 1, bias=False)
    nn.init.constant_(module.weight, 2.0)
    optimizer = make_optimizer(
        module, OptimizerConfig(name="lion", lr=0.1, betas=(0.9, 0.5), weight_decay=0.5)
    )
    weight, momentum = 2.0, 0.0
    for gradient in (3.0, -1.0, -40.0, 0.0):
        module.weight.grad = torch.full((1, 1), gradient)
        optimizer.step()
        # arXiv:2302.06675, algorithm 2.
        direction = math.copysign(1.0, 0.9 * momentum + 0.1 * gradient)
        weight -= 0.1 * (direction + 0.5 * weight)
        momentum = 0.5 * momentum + 0.5 * gradient
        assert module.weight.item() == pytest.approx(weight)


@pytest.fixture
def tiny() -> Any:
    """A GPT-2 whose input and output embeddings are one."""
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=8, n_embd=8, n_layer=3, n_head=2))


def wrapped(tiny: Any, wrap: dict[str, Any] | None, tmp_path: Path) -> tuple[list[str], str]:
    (tmp_path / "run.yaml").write_text(
        f"{RUN_FILE}engine: {json.dumps({'name': 'fsdp', 'wrap': wrap})}\n"
    )
    found, why = blocks_of(tiny, RunConfig.load(tmp_path / "run.yaml"))
    return [type(module).__name__ for module in found], why


def test_a_layer_that_the_model_does_not_have_is_refused_with_those_it_has(
    tiny: Any, tmp_path: Path
) -> None:
    with pytest.raises(UsageError) as caught:
        wrapped(tiny, {"layer": "LlamaDecoderLayer"}, tmp_path)
    assert "no layer `LlamaDecoderLayer`" in caught.value.message
    assert "GPT2Block, GPT2MLP, GPT2Attention" in caught.value.remedy


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_bf16_learns_what_fp32_learns_but_for_rounding(
    results: dict[str, Any], engine: str
) -> None:
    low, full = (results[f"{engine}-adamw-{precision}"]["steps"] for precision in ("bf16", "fp32"))
    assert [loss for loss, _ in low] == pytest.approx([loss for loss, _ in full], rel=0.03)
    assert low != full
