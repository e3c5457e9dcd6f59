"""Compares what the product answers now with a golden, and shows a short difference."""

from __future__ import annotations

import difflib
import itertools

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
    before, after = recorded.splitlines(), actual.splitlines()
    lines = []
    for tag, a, b, c, d in difflib.SequenceMatcher(None, before, after, False).get_opcodes():
        if tag != "equal":
            for old, new in itertools.zip_longest(before[a:b], after[c:d]):
                pairs = enumerate(zip(old or "", new or "", strict=False))
                at = next((place for place, (one, other) in pairs if one != other), 0)
                lines += [f"-{_cut(old, at)}"] if old is not None else []
                lines += [f"+{_cut(new, at)}"] if new is not None else []
    more = len(lines) - LINES
    shown = lines[:LINES] + ([f"... and {more} more lines"] if more > 0 else [])
    return "\n".join(["--- recorded", "+++ now", *shown])


def _cut(line: str, at: int) -> str:
    """The beginning of a long line, and what is around its first difference."""
    if len(line) <= WIDTH:
        return line
    if at < WIDTH // 2:
        return f"{line[:WIDTH]}..."
    start = at - WIDTH // 6
    return f"{line[: WIDTH // 4]} ... {line[start : start + WIDTH * 3 // 4]}..."
