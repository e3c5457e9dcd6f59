"""The keys `masked_share` and `whole_words` of a run file: what masked-lm hides. Pure."""

from __future__ import annotations

from typing import Any

from runner.errors import Lines, UsageError

DEFAULTS = {"masked_share": 0.15, "whole_words": False}


def keys_not_masked(task: str) -> tuple[str, ...]:
    """Returns the keys that mean nothing to a task."""
    return () if task == "masked-lm" else tuple(DEFAULTS)


def check_masking(task: str, config: Any, lines: Lines) -> None:
    """Finds keys of masking in a run file of another task. Kept in `lines.mistakes`."""
    for key in keys_not_masked(task):
        with lines.mistakes:
            if getattr(config, key) != DEFAULTS[key]:
                raise UsageError(
                    f"{lines.place(key)}: task {task} masks no tokens.",
                    f"Remove {key}, or set task: masked-lm.",
                )
