"""The learning rate over a run."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runner.config.engine import OptimizerConfig
from runner.training.components.optimization import (
    make_optimizer,
    rate,
    skips_on_device,
    warmup_steps,
)

NAMES = ("cosine", "linear", "constant", "wsd")


@pytest.mark.parametrize(
    ("name", "decay", "after"),
    [
        ("cosine", 0, [2.0, 1 + 0.5**0.5, 1.0, 1 - 0.5**0.5, 0.0]),
        ("linear", 0, [2.0, 1.5, 1.0, 0.5, 0.0]),
        ("constant", 0, [2.0, 2.0, 2.0, 2.0, 2.0]),
        ("wsd", 3, [2.0, 2.0, 4 / 3, 2 / 3, 0.0]),
        ("wsd", 9, [2.0, 1.5, 1.0, 0.5, 0.0]),  # longer than what the warm-up leaves
        ("wsd", 0, [2.0, 2.0, 2.0, 2.0, 0.0]),
    ],
)
def test_the_decay_is_at_its_end_when_the_steps_are(
    name: str, decay: int, after: list[float]
) -> None:
    rates = [rate(name, 2.0, 2, 6, step, decay) for step in range(7)]
    assert rates == pytest.approx([1.0, 2.0, *after])


@given(
    name=st.sampled_from(NAMES),
    steps=st.integers(1, 200),
    warmup=st.floats(0, 0.99) | st.integers(1, 400),
)
def test_the_rate_rises_to_the_peak_and_never_rises_again(
    name: str, steps: int, warmup: float
) -> None:
    warm = warmup_steps(float(warmup), steps)
    rates = [rate(name, 2.0, warm, steps, step) for step in range(steps)]
    assert all(0 < value <= 2.0 for value in rates)
    top = min(warm, steps)
    assert rates[:top] == sorted(rates[:top])
    assert rates[top:] == sorted(rates[top:], reverse=True)


@pytest.mark.parametrize(
    ("warmup", "steps", "expected"),
    [(0, 100, 0), (0.05, 100, 5), (0.05, 8, 1), (1, 100, 1), (20, 100, 20)],
)
def test_warmup_is_a_share_below_1_and_steps_from_1_on(
    warmup: float, steps: int, expected: int
) -> None:
    assert warmup_steps(warmup, steps) == expected


def test_adamw_is_fused_and_skips_a_step_that_is_not_finite_without_the_host() -> None:
    """On CPUs too: a loop over tensors takes four to seven times as long. Lion's norm is read."""
    module = torch.nn.Linear(3, 2)
    adamw = make_optimizer(module, OptimizerConfig())
    assert adamw.defaults["fused"] is True
    before = module.weight.detach().clone()
    for norm, moves in ((math.inf, False), (math.nan, False), (1.0, True)):
        for parameter in module.parameters():
            parameter.grad = torch.full_like(parameter, 0.1 if moves else norm)
        assert skips_on_device(adamw, torch.tensor(norm))
        adamw.step()
        assert torch.equal(before, module.weight) != moves
    assert not skips_on_device(make_optimizer(module, OptimizerConfig(name="lion")), torch.ones(()))
