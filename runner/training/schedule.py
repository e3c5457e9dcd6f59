"""The learning rate: a pure function of the step, the same for every engine."""

from __future__ import annotations

import math


def rate(name: str, peak: float, warmup_steps: int, num_steps: int, step: int, decay_steps: int = 0) -> float:
    """The learning rate of a step.

    Args:
        name: `cosine` and `linear` end at zero after the last step, `constant` stays, `wsd` stays and falls linearly
            to zero over the last `decay_steps` (warm-up, stable, decay: arXiv:2404.06395, 4.1).
        peak: reached after the warm-up, which rises linearly.
        step: counted from 0.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if name == "constant":
        return peak
    if name == "wsd":
        return peak * min(1.0, (num_steps - step) / max(1, min(decay_steps, num_steps - warmup_steps)))
    done = (step - warmup_steps) / max(1, num_steps - warmup_steps)
    return peak * (1 - done) if name == "linear" else peak * 0.5 * (1 + math.cos(math.pi * done))


def warmup_steps(warmup: float, num_steps: int) -> int:
    """Steps of warm-up, or of decay: a share of all steps below 1, a number of steps from 1 on."""
    return math.ceil(warmup * num_steps) if warmup < 1 else int(warmup)
