"""Formats the automatic choices of a run: keys that the user set are not among them. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from runner.config.fields import Choice

LEFT_OUT = "left out"
"""The value of a key of the user's ds_config.json that is not used."""
NOTHING: tuple[object, ...] = (None, "", {}, ())


def choice_lines(choices: Iterable[Choice]) -> list[str]:
    """Returns one line per choice: key, value and reason."""
    return [
        " ".join(f"{choice.key}: {shown(choice.value)}  ({choice.reason})".split("\n"))
        for choice in choices
        if choice.value not in NOTHING
    ]


def choices_as_comments(choices: Iterable[Choice]) -> str:
    """Returns all choices as comments of a YAML file; empty: there are none."""
    lines = [f"#   {line}" for line in choice_lines(choices)]
    return "\n".join(["# Automatic choices, with reasons:", *lines, ""]) if lines else ""


def of_ds_config(notes: Iterable[Choice], choices: Iterable[Choice] = ()) -> list[str]:
    """Returns a line for each decision about the user's ds_config.json that it does not ask for.

    Args:
        notes: of the run file.
        choices: all of it: those for an "auto" of that file are on one line.
    """
    found = [note for note in notes if note.group and '"auto"' not in note.reason]
    lines = [f"{note.group}: {line}" for note in found for line in choice_lines([note])]
    autos = [choice for choice in choices if choice.group.startswith('"auto" in ')]
    if autos:
        values = ", ".join(f"{choice.key} {shown(choice.value)}" for choice in autos)
        lines.append(f"{autos[0].group}: {values}  (the run file's value, or its default)")
    return lines


def shown(value: object) -> str:
    """Returns a value as a run file has it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return f"[{', '.join(map(shown, value))}]" if isinstance(value, tuple) else str(value)
