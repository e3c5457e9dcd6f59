"""A weight that is no number ends the run before the first step, with its name."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from runner.from_stage import StageError, UsageError
from runner.inputs import ModelInput
from runner.training.components.process_group import Ranks
from runner.training.loading import _drawn
from runner.training.weights import Weights
from tests.runner.training.saving.conftest import ranks

__all__ = ["ranks"]
pytestmark = pytest.mark.usefixtures("ranks")


def fill(module: nn.Module, narrow: torch.dtype | None = None) -> None:
    weights = Weights(module, torch.device("cpu"), narrow=narrow)
    weights.fill(list(module.parameters()))
    weights.finish()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_no_number_is_named(value: float) -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    with torch.no_grad():
        module.get_parameter("1.weight")[1, 2] = value
    with pytest.raises(StageError, match=r"the weight 1\.weight has values that are nan or inf"):
        fill(module)


def test_a_weight_too_large_for_fp16_is_named_with_the_precision_that_holds_it() -> None:
    module = nn.Linear(2, 2)
    with torch.no_grad():
        module.weight[0, 0] = 70_000.0
    fill(copy.deepcopy(module), torch.bfloat16)
    with pytest.raises(StageError, match="beyond 65504") as caught:
        fill(module, torch.float16)
    assert "set precision: bf16 or fp32" in caught.value.remedy


def test_a_buffer_may_be_infinite() -> None:
    module = nn.Linear(2, 2)
    module.register_buffer("mask", torch.tensor([0.0, float("-inf")]))
    fill(module)
    assert torch.isinf(module.get_buffer("mask")).any()


def test_weights_whose_sum_would_be_infinite_and_weights_of_8_bits_are_no_fault() -> None:
    module = nn.Linear(4, 4, bias=False)
    with torch.no_grad():
        module.weight.fill_(60_000.0)
    fill(module, torch.float16)
    assert (module.weight == 60_000.0).all()
    narrow = nn.ParameterDict(
        {
            "scaled": nn.Parameter(torch.ones(4).to(torch.float8_e4m3fn), requires_grad=False),
            "empty": nn.Parameter(torch.empty(0)),
        }
    )
    fill(narrow)
    assert narrow["scaled"].dtype == torch.float8_e4m3fn


def test_weights_of_another_shape_than_config_json_says_are_refused() -> None:
    """transformers would draw them at random."""
    model = ModelInput("m", Path("m"), "acme/m", None, {}, {})
    info = {"mismatched_keys": ["classifier.weight", "encoder.weight"], "missing_keys": []}
    with pytest.raises(UsageError, match=r"do not fit config\.json: encoder\.weight"):
        _drawn(info, model, ("classifier",))
    assert _drawn({**info, "mismatched_keys": ["classifier.weight"]}, model, ("classifier",)) == [
        "classifier.weight"
    ]


def test_what_rank_0_cannot_make_ends_every_rank(ranks: Ranks) -> None:
    def fail() -> None:
        raise StageError("the store is gone", "prepare again", exit_code=4)

    with pytest.raises(StageError, match="the store is gone") as refused:
        ranks.from_first(fail)
    assert refused.value.exit_code == 4
