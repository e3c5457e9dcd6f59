"""The ways to spread a model that are compared: the one list of them."""

from __future__ import annotations

from collections.abc import Sequence

from runner.errors import UsageError

STRATEGIES = {
    "ddp": "{name: ddp}",
    "zero0": "{name: deepspeed, zero: 0}",
    "zero1": "{name: deepspeed, zero: 1}",
    "zero2": "{name: deepspeed, zero: 2}",
    "zero3": "{name: deepspeed, zero: 3}",
    "fsdp-grad-op": "{name: fsdp, sharding: grad_op}",
    "fsdp-full": "{name: fsdp, sharding: full}",
    "zero2-offload": "{name: deepspeed, zero: 2, offload: cpu}",
    "zero3-offload": "{name: deepspeed, zero: 3, offload: cpu}",
    "fsdp-full-offload": "{name: fsdp, sharding: full, offload: cpu}",
}
"""Name -> what the run file's `engine:` becomes."""

BY_DEFAULT = tuple(name for name in STRATEGIES if not name.endswith("-offload"))
"""Offloading is for what does not fit otherwise, and slow to try."""


def chosen(text: str | None) -> tuple[str, ...]:
    """The strategies of `--strategies a,b`; those without offload where it is not given.

    Raises:
        UsageError: one that is none; names those there are.
    """
    if text is None:
        return BY_DEFAULT
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if unknown := [name for name in names if name not in STRATEGIES]:
        raise UsageError(f"--strategies {unknown[0]}: no such strategy.", f"There are: {', '.join(STRATEGIES)}.")
    if not names:
        raise UsageError("--strategies names none.", f"There are: {', '.join(STRATEGIES)}.")
    return names


def overrides(strategy: str, micro: int, world_size: int, theirs: Sequence[str]) -> list[str]:
    """The `--set` texts of one trial: theirs, then the strategy and a step of one micro batch a rank."""
    ours = (f"engine={STRATEGIES[strategy]}", f"batch.micro={micro}", f"batch.global={micro * world_size}")
    return [*theirs, *ours]
