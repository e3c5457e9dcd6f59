"""Formats the automatic choices of a run. Pure.

`explain_choices` prints them at the start, one line per group of keys. `choices_as_comments` lists
all of them for the run folder, one per line. Keys that the user set are not among them.
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable

from runner.config.fields import Choice

WIDTH = 120  # columns at most; a narrower terminal has its own
NOTHING: tuple[object, ...] = (None, "", {}, ())
NOT_USED = "not used"


def explain_choices(choices: Iterable[Choice]) -> list[str]:
    """Returns one line per group of choices, with values and reasons.

    Choices that are still `auto` are omitted. The ranks print them, because they know the device.
    """
    groups: dict[str, list[Choice]] = {}
    for choice in choices:
        if choice.value != "auto" and choice.value not in NOTHING:
            groups.setdefault(_group(choice), []).append(choice)
    unused = groups.pop(NOT_USED, None)
    if unused:
        groups[NOT_USED] = unused
    return [line for name, members in groups.items() for line in _lines(name, members)]


def choices_as_comments(choices: Iterable[Choice]) -> str:
    """Returns all choices as comments of a YAML file; empty: there are none."""
    lines = [
        " ".join(f"#   {choice.key}: {shown(choice.value)}  ({choice.reason})".split("\n"))
        for choice in choices
        if choice.value not in NOTHING
    ]
    return "\n".join(["# Automatic choices, with reasons:", *lines, ""]) if lines else ""


def shown(value: object) -> str:
    """Returns a value as a run file has it."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"[{', '.join(map(shown, value))}]" if isinstance(value, tuple) else str(value)


def _group(choice: Choice) -> str:
    if choice.group:
        return choice.group
    if choice.value is False or choice.value == "none":
        return NOT_USED
    section, _, rest = choice.key.partition(".")
    return section if rest else "run"


def _lines(name: str, members: list[Choice]) -> list[str]:
    by_reason: dict[str, list[str]] = {}
    for choice in members:
        by_reason.setdefault(choice.reason, []).append(_value(choice, name))
    parts = [
        ", ".join(values) if reason == f"from {name}" else f"{', '.join(values)} ({reason})"
        for reason, values in by_reason.items()
    ]
    text = f"  {name}: {'; '.join(parts)}"
    width = min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns)
    return textwrap.wrap(
        text, width, subsequent_indent=" " * 4, break_long_words=False, break_on_hyphens=False
    )


def _value(choice: Choice, group: str) -> str:
    if group == NOT_USED:
        return choice.key
    return f"{choice.key.removeprefix(f'{group}.')} {shown(choice.value)}"
