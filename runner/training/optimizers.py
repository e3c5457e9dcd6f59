"""The optimizers of a run file, over the parameters that are trained.

Each takes whole parameters, DTensors or the flat partitions of ZeRO, as far as `runner.engine_config.OPTIMIZERS` says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from runner.engine_config import OptimizerConfig
from runner.errors import UsageError


def make_optimizer(module: nn.Module, config: OptimizerConfig, *, fused: bool = False) -> torch.optim.Optimizer:
    """The optimizer of a run file; biases and norms (vectors) do not decay, as in BERT (google-research/bert).

    Args:
        fused: one kernel for all weights: they must lie on one kind of device that has it.

    Raises:
        UsageError: its library is not installed.
    """
    groups = _groups(module, config.weight_decay)
    if config.name == "adamw":
        return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=fused or None)
    if config.name == "lion":
        return Lion(groups, lr=config.lr, betas=config.betas)
    if config.name == "adafactor":
        from transformers import Adafactor

        # As Trainer's `--optim adafactor`: the schedule alone decides the rate.
        kwargs = {"scale_parameter": False, "relative_step": False, "warmup_init": False}
        return Adafactor(groups, lr=config.lr, **kwargs)  # type: ignore[no-untyped-call]
    bnb = _bitsandbytes(config.name)
    kind = bnb.optim.AdamW8bit if config.name == "adamw_8bit" else bnb.optim.PagedAdamW8bit
    return kind(groups, lr=config.lr, betas=config.betas, eps=config.eps)  # type: ignore[no-any-return]


def _groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    parameters = [p for p in module.parameters() if p.requires_grad]
    # A parameter that ZeRO-3 has partitioned is an empty vector; its true shape is in `ds_shape`.
    is_vector = {id(p): len(getattr(p, "ds_shape", p.shape)) <= 1 for p in parameters}
    groups = [
        {"params": [p for p in parameters if not is_vector[id(p)]], "weight_decay": weight_decay},
        {"params": [p for p in parameters if is_vector[id(p)]], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _bitsandbytes(name: str) -> Any:
    try:
        import bitsandbytes
    except ImportError:
        raise UsageError(f"optimizer.name: {name} needs bitsandbytes", "pip install bitsandbytes") from None
    return bitsandbytes


class Lion(torch.optim.Optimizer):
    """Sign of an interpolated momentum (arXiv:2302.06675, algorithm 2), decay decoupled: one moment instead of two.

    Args:
        groups: parameter groups, each with its `weight_decay`.
        lr: 3 to 10 times smaller than for AdamW, with a decay larger by as much (section 5 there).
    """

    def __init__(self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float]) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of all parameters that have a gradient."""
        loss = None if closure is None else closure()
        for group in self.param_groups:
            lr, (first, second) = group["lr"], group["betas"]
            for parameter in (p for p in group["params"] if p.grad is not None):
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                momentum: torch.Tensor = state["exp_avg"]
                parameter.mul_(1 - lr * group["weight_decay"])
                parameter.add_(torch.lerp(parameter.grad, momentum, first).sign_(), alpha=-lr)
                momentum.lerp_(parameter.grad, 1 - second)
        return loss
