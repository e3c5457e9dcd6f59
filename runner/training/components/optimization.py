"""The optimizers of a run file, clipping; what follows from the step: learning rate, epoch.

Each optimizer takes whole parameters, DTensors or the flat partitions of ZeRO, as far as
`runner.config.engine.OPTIMIZERS` says. The learning rate depends on the step only. It is the same
for every engine, but where a ds_config.json has a scheduler: then DeepSpeed's own says it.
"""

from __future__ import annotations

import importlib
import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from runner.config.engine import OptimizerConfig
from runner.config.run_config import RunConfig
from runner.from_stage import human_count


def make_optimizer(module: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """The optimizer of a run file, over the trained parameters.

    Biases and norms (vectors) do not decay, as in BERT (google-research/bert). AdamW is torch's
    fused one on GPUs and CPUs: one kernel for all weights (on a CPU 4 to 7 times faster than the
    loop over tensors; weights differ by rounding, 5e-7 after ten steps).

    Args:
        module: has the parameters.
        config: the optimizer's settings.
    """
    groups = _groups(module, config.weight_decay)
    if config.name == "adamw":
        return torch.optim.AdamW(
            groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True
        )
    if config.name == "lion":
        return Lion(groups, lr=config.lr, betas=config.betas)
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum)
    if config.name == "adafactor":
        from transformers import Adafactor

        # As `--optim adafactor` of transformers' Trainer: only the schedule changes the rate.
        kwargs = {"scale_parameter": False, "relative_step": False, "warmup_init": False}
        return Adafactor(groups, lr=config.lr, **kwargs)  # type: ignore[no-any-return]
    bnb: Any = importlib.import_module("bitsandbytes.optim")
    kind = bnb.AdamW8bit if config.name == "adamw_8bit" else bnb.PagedAdamW8bit
    return kind(groups, lr=config.lr, betas=config.betas, eps=config.eps)  # type: ignore[no-any-return]


def _groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    parameters = [p for p in module.parameters() if p.requires_grad]
    # A parameter that ZeRO-3 has partitioned is an empty vector; `ds_shape` has its shape.
    is_vector = {id(p): len(getattr(p, "ds_shape", p.shape)) <= 1 for p in parameters}
    groups = [
        {"params": [p for p in parameters if not is_vector[id(p)]], "weight_decay": weight_decay},
        {"params": [p for p in parameters if is_vector[id(p)]], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


class Lion(torch.optim.Optimizer):
    """Lion (arXiv:2302.06675, algorithm 2): the sign of a momentum, with decoupled weight decay.

    It keeps one moment per parameter instead of two.

    Args:
        groups: parameter groups, each with its `weight_decay`.
        lr: 3 to 10 times smaller than for AdamW, with a decay as many times larger (section 5).
        betas: of the interpolation and of the momentum.
    """

    def __init__(self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float]) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Updates all parameters that have a gradient."""
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


def clip(parameters: Iterable[nn.Parameter], most: float) -> torch.Tensor:
    """Scales gradients down, in place, to a global norm.

    Args:
        parameters: those without a gradient do not count.
        most: the largest norm; 0: no clipping.

    Returns:
        The norm before, a scalar on the device.
    """
    trained = [p for p in parameters if p.grad is not None]
    norm = torch.nn.utils.get_total_norm([p.grad for p in trained if p.grad is not None])
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    if most:
        torch.nn.utils.clip_grads_with_norm_(trained, most, norm)
    return norm


def skips_on_device(optimizer: Any, norm: torch.Tensor) -> bool:
    """Lets torch's fused optimizers skip a step whose gradient is not finite, on the device.

    Args:
        optimizer: its next `step` updates nothing if `norm` is not finite.
        norm: of the gradient, a scalar on the device.

    Returns:
        Whether it can. If not, the host must look at the norm, and waits for it.
    """
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    optimizer.grad_scale, optimizer.found_inf = None, (~norm.isfinite()).float()
    return True


def rate(
    name: str, peak: float, warmup_steps: int, num_steps: int, step: int, decay_steps: int = 0
) -> float:
    """The learning rate of a step.

    Args:
        name: `cosine` and `linear` end at zero after the last step; `constant` stays; `wsd` stays
            and falls linearly to zero over the last `decay_steps` (warm-up, stable, decay:
            arXiv:2404.06395, 4.1).
        peak: the rate after the warm-up. The warm-up rises linearly.
        warmup_steps: the length of the warm-up.
        num_steps: of the whole run.
        step: counted from 0.
        decay_steps: for `wsd` only.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if name == "constant":
        return peak
    if name == "wsd":
        return peak * min(
            1.0, (num_steps - step) / max(1, min(decay_steps, num_steps - warmup_steps))
        )
    done = (step - warmup_steps) / max(1, num_steps - warmup_steps)
    return peak * (1 - done) if name == "linear" else peak * 0.5 * (1 + math.cos(math.pi * done))


class DeepSpeedRate:
    """The learning rates of the scheduler of a ds_config.json, by DeepSpeed's own class.

    Args:
        config: the run file, with that scheduler in `deepspeed`.
        num_steps: optimizer steps of the whole run.

    Raises:
        TypeError, ValueError: DeepSpeed refuses one of its settings.
    """

    def __init__(self, config: RunConfig, num_steps: int) -> None:
        from deepspeed.runtime import lr_schedules

        scheduler = config.deepspeed["scheduler"]
        settings = dict(scheduler.get("params", {}))
        settings["warmup_num_steps"] = max(1, warmup_steps(config.schedule.warmup, num_steps))
        if scheduler["type"] == "WarmupCosineLR":  # it goes to the optimizer's own rate
            settings.setdefault("total_num_steps", num_steps)
        else:
            settings["warmup_max_lr"] = config.optimizer.lr
        if scheduler["type"] == "WarmupDecayLR":
            settings.setdefault("total_num_steps", num_steps)
        # A scheduler writes its rate into an optimizer; this one updates nothing.
        self._optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=config.optimizer.lr)
        kind = getattr(lr_schedules, scheduler["type"])
        # It warns that it is asked for a rate before the first step, by itself; DeepSpeed writes
        # warnings to stdout, where JSON may be.
        before = logging.root.manager.disable
        logging.disable(logging.WARNING)
        try:
            self._scheduler = kind(self._optimizer, **settings)
        finally:
            logging.disable(before)
        self._first = float(self._optimizer.param_groups[0]["lr"])

    def __call__(self, step: int) -> float:
        """The rate of a step, counted from 0: DeepSpeed steps its scheduler after each step."""
        if step == 0:
            return self._first
        self._scheduler.step(step - 1)
        return float(self._optimizer.param_groups[0]["lr"])


def warmup_steps(warmup: float, num_steps: int) -> int:
    """Steps of warm-up or decay: below 1 a share of all steps, from 1 on a number of steps."""
    return math.ceil(warmup * num_steps) if warmup < 1 else int(warmup)


@dataclass(frozen=True)
class Schedule:
    """The steps of a run, counted from 0; `step` is how many are done.

    Attributes:
        config: the run file.
        num_steps: optimizer steps of the whole run.
        total: samples per step.
        per_epoch: samples per epoch.
    """

    config: RunConfig
    num_steps: int
    total: int
    per_epoch: int

    @cached_property
    def _theirs(self) -> DeepSpeedRate:
        return DeepSpeedRate(self.config, self.num_steps)

    def epoch(self, step: int) -> float:
        """How many epochs are done."""
        return step * self.total / self.per_epoch

    def rate(self, step: int) -> float:
        """The learning rate of the next step."""
        if "scheduler" in self.config.deepspeed:
            return self._theirs(step)
        schedule, steps = self.config.schedule, self.num_steps
        warmup, decay = (warmup_steps(share, steps) for share in (schedule.warmup, schedule.decay))
        return rate(schedule.name, self.config.optimizer.lr, warmup, steps, step, decay)

    def ends_epoch(self, step: int) -> bool:
        """Whether an epoch ended in the step before."""
        return step * self.total // self.per_epoch > (step - 1) * self.total // self.per_epoch

    def evaluates_after(self, step: int) -> bool:
        """Whether to evaluate now: after every `evaluation.every`, and at the end."""
        every = self.config.evaluation.every
        if step == self.num_steps:
            return True
        return self.ends_epoch(step) if every == "epoch" else step % every == 0

    def describe(self, ranks: str) -> str:
        """The line that opens a training on `ranks`."""
        rounded, epochs = "", self.config.epochs
        if self.config.steps is None and epochs is not None:
            asked = epochs * self.per_epoch / self.total
            if asked < self.num_steps:
                rounded = f" (epochs: {epochs:g} is {asked:.1f} steps, rounded up)"
        steps, size = human_count(self.num_steps, "step"), human_count(self.total, "sequence")
        return f"training {steps} of {size} on {ranks}{rounded}"
