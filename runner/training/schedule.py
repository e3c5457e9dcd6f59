"""The learning rate: a pure function of the step, the same for every engine."""

from __future__ import annotations

import math


def rate(name: str, peak: float, warmup_steps: int, num_steps: int, step: int) -> float:
    """The learning rate of a step.

    Args:
        name: `cosine` and `linear` end at zero after the last step, `constant` stays.
        peak: reached after the warm-up, which rises linearly.
        step: counted from 0.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if name == "constant":
        return peak
    done = (step - warmup_steps) / max(1, num_steps - warmup_steps)
    return peak * (1 - done) if name == "linear" else peak * 0.5 * (1 + math.cos(math.pi * done))


def warmup_steps(warmup: float, num_steps: int) -> int:
    """Steps of warm-up: a share of all steps below 1, a number of steps from 1 on."""
    return math.ceil(warmup * num_steps) if warmup < 1 else int(warmup)
