"""Compares what the product answers now with a golden, and shows a short difference."""

from __future__ import annotations

import difflib
import itertools

from tests.golden.record import path_of

LINES = 30
WIDTH = 1000


def must_equal(name: str, actual: str, expected: str | None = None) -> None:
    """Fails with the first differing lines.

    Args:
        expected: a part of the golden, where only that part was recorded again.
    """
    recorded = path_of(name).read_text(encoding="utf-8") if expected is None else expected
    if actual != recorded:
        raise AssertionError(
            f"{_difference(recorded, actual)}\n"
            f"If this is wanted: `python -m tests.golden.record {name}`, "
            "and the commit says why it changes."
        )


def _difference(recorded: str, actual: str) -> str:
    """The first differing lines; long ones are cut."""
    before, after = recorded.splitlines(), actual.splitlines()
    changes = difflib.unified_diff(before, after, "recorded", "now", n=0, lineterm="")
    return "\n".join(line[:WIDTH] for line in itertools.islice(changes, LINES))
