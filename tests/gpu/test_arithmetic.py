"""Loss and gradients of a step on this device."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.gpu.conftest import MakeTrainer

STEADY = {"model": {"asset": "steady-bert"}}  # no dropout


@pytest.mark.parametrize(("precision", "difference"), [("fp32", 1e-4), ("bf16", 0.05)])
def test_loss_and_gradient_are_those_of_float64(
    trainer: MakeTrainer, device: torch.device, precision: str, difference: float
) -> None:
    made = trainer(precision, engine={"name": "ddp"}, precision=precision, **STEADY)
    if precision == "fp32" and device.type == "cuda":
        difference = 2e-3  # TF32: 10 bits of mantissa
    exact = copy.deepcopy(made.task.module).to("cpu", torch.float64)
    batch = made.load(0).on(made.device)[0]
    loss = made.engine.forward(dict(batch))
    made.engine.backward(loss, last=True)
    expected = exact(**{name: tensor.cpu() for name, tensor in batch.items()})
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=difference)
    found = {name: p.grad for name, p in made.task.module.named_parameters() if p.grad is not None}
    assert found
    for name, parameter in exact.named_parameters():
        if parameter.grad is None or parameter.grad.norm() < 1e-6:
            continue
        error = (found[name].cpu().double() - parameter.grad).norm() / parameter.grad.norm()
        assert error < difference, name
