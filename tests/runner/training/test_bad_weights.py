"""A weight that is no number ends the run before the first step, with its name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from runner.errors import StageError
from runner.training.components.device import DTYPES
from runner.training.weights import Weights
from tests.remedies.obeyed import in_it, obeys


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rank", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def fill(module: nn.Module, narrow: torch.dtype | None = None) -> None:
    weights = Weights(module, torch.device("cpu"), narrow=narrow)
    weights.fill(list(module.parameters()))
    weights.finish()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_no_number_is_named(value: float) -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    with torch.no_grad():
        module.get_parameter("1.weight")[1, 2] = value
    with pytest.raises(StageError, match=r"the weight 1\.weight has values that are nan or inf"):
        fill(module)


@obeys("runner/training/weights.py", "Stage another revision of the model (or export it again")
@pytest.mark.usefixtures("one_rank")
def test_a_weight_too_large_for_fp16_is_named_with_the_precision_that_holds_it() -> None:
    def large() -> nn.Module:
        module = nn.Linear(2, 2)
        with torch.no_grad():
            module.weight[0, 0] = 70_000.0
        return module

    fill(nn.Linear(2, 2), torch.float16)  # another revision
    with pytest.raises(StageError) as caught:
        fill(large(), torch.float16)
    assert "beyond 65504" in caught.value.message
    words = in_it(caught.value.remedy, r"(?<=set precision: )\w+ or \w+")
    for precision in words.split(" or "):
        fill(large(), DTYPES[precision])


@pytest.mark.usefixtures("one_rank")
def test_a_buffer_may_be_infinite() -> None:
    module = nn.Linear(2, 2)
    module.register_buffer("mask", torch.tensor([0.0, float("-inf")]))
    fill(module)
    assert torch.isinf(module.get_buffer("mask")).any()


@pytest.mark.usefixtures("one_rank")
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
