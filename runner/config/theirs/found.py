"""What a file of another tool gives: keys of a run file with reasons, and what has no equal."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Found:
    """The settings that were found.

    Attributes:
        values: dotted key of the run file -> value.
        reasons: the same keys -> the setting of theirs that says so.
        left_out: setting of theirs -> why the run file has no equal.
    """

    values: dict[str, Any] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def take(self, key: str, value: object, theirs: str, said: object) -> None:
        """Keeps a value, and the setting that says so."""
        self.values[key] = value
        self.reasons[key] = f"{theirs}: {shown(said)}"

    def leave(self, theirs: str, said: object, why: str) -> None:
        """Keeps a setting that has no equal."""
        self.left_out[f"{theirs}: {shown(said)}"] = why

    def add(self, other: Found) -> None:
        """Adds all that another part of the same file gives."""
        self.values |= other.values
        self.reasons |= other.reasons
        self.left_out |= other.left_out


def shown(value: object) -> str:
    """A value as YAML and JSON write it, on one short line."""
    is_word = value is None or isinstance(value, bool)
    text = json.dumps(value) if is_word else " ".join(str(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."


def is_true(value: object) -> bool:
    """Whether a setting is on: these tools write true, "true" and 1."""
    return str(value).lower() in ("true", "1", "yes")


def is_set(value: object) -> bool:
    """Whether a setting says anything; false, null and empty values do not."""
    return not (value is None or value is False or value in ("", [], {}, "none", "no", "NO"))


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys -> mappings in mappings."""
    tree: dict[str, Any] = {}
    for dotted, value in values.items():
        *sections, last = dotted.split(".")
        here = tree
        for section in sections:
            here = here.setdefault(section, {})
        here[last] = value
    return tree
