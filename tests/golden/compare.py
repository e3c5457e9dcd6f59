"""Compares what the product answers now with a golden, and shows a short difference."""

from __future__ import annotations

import difflib

from tests.golden.record import path_of

LINES = 30
WIDTH = 300


def must_equal(name: str, actual: str, expected: str | None = None) -> None:
    """Fails with the first differing lines.

    Args:
        expected: a part of the golden, where only that part was recorded again.
    """
    recorded = path_of(name).read_text(encoding="utf-8") if expected is None else expected
    if actual != recorded:
        raise AssertionError(
            f"{difference(recorded, actual)}\n"
            f"If this is wanted: `python -m tests.golden.record {name}`, "
            "and the commit says why it changes."
        )


def difference(recorded: str, actual: str) -> str:
    lines = [
        line if len(line) <= WIDTH else line[:WIDTH] + "..."
        for line in difflib.unified_diff(
            recorded.splitlines(), actual.splitlines(), "recorded", "now", n=0, lineterm=""
        )
        if not line.startswith("@@")
    ]
    more = len(lines) - LINES
    return "\n".join(lines[:LINES] + ([f"... and {more} more lines"] if more > 0 else []))
