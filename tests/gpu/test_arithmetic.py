"""Losses, gradients and number formats of a step on this device."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.gpu.conftest import MakeTrainer

ENGINES: dict[str, dict[str, Any]] = {
    "ddp": {"name": "ddp"},
    "fsdp": {"name": "fsdp"},
    "zero0": {"zero": 0},
    "zero1": {"zero": 1},
    "zero2": {"zero": 2},
    "zero3": {"zero": 3},
}
STEADY = {"model": {"asset": "steady-bert"}}  # no dropout
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")


class Formats(TorchDispatchMode):
    """The number formats of all matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[torch.dtype] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function.name().partition(".")[0] in PRODUCTS:
            self.seen |= {a.dtype for a in args if isinstance(a, torch.Tensor)}
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("engine", ENGINES)
def test_every_product_of_a_step_is_in_bf16(
    trainer: MakeTrainer, device: torch.device, engine: str
) -> None:
    """ZeRO-3 once computed in float32: 16 times slower on an A100."""
    if device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        pytest.skip("this GPU has no bf16")
    made = trainer(engine, engine=ENGINES[engine], precision="bf16", **STEADY)
    with Formats() as formats:
        made.train_step()
    assert formats.seen == {torch.bfloat16}


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
