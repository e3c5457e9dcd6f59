"""The ways to spread a model that are compared."""

from __future__ import annotations

from collections.abc import Sequence

from runner.errors import UsageError, suggest

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
"""Name -> the value of the run file's `engine:`."""

BY_DEFAULT = tuple(name for name in STRATEGIES if not name.endswith("-offload"))
"""Without offload, which is slow and only for models that do not fit otherwise."""


def chosen(text: str | None) -> tuple[str, ...]:
    """The strategies of `--strategies a,b`; by default those without offload.

    Raises:
        UsageError: a name is not a strategy, or there is none. The message lists all strategies.
    """
    if text is None:
        return BY_DEFAULT
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if unknown := [name for name in names if name not in STRATEGIES]:
        raise UsageError(
            f"--strategies {unknown[0]}: no such strategy.",
            suggest(unknown[0], STRATEGIES, f"There are: {', '.join(STRATEGIES)}."),
        )
    if not names:
        raise UsageError("--strategies names none.", f"There are: {', '.join(STRATEGIES)}.")
    return names


def overrides(strategy: str, micro: int, world_size: int, theirs: Sequence[str]) -> list[str]:
    """The `--set` texts of one trial: the user's, then the strategy with one micro batch per rank.

    Args:
        strategy: its name.
        micro: samples per micro batch.
        world_size: the number of ranks.
        theirs: the user's `--set` texts.
    """
    ours = (
        f"engine={STRATEGIES[strategy]}",
        f"batch.micro={micro}",
        f"batch.global={micro * world_size}",
    )
    return [*theirs, *ours]
