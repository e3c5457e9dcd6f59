"""`--set key=value`: keys of a run file that are given on the command line.

(run file as YAML data, its lines, texts) -> (YAML data, places). A refused value is placed on the command line.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from runner.errors import Lines, UsageError, read_value


class _Places(Lines):
    """Line numbers, where a value that came by `--set` is placed on the command line instead."""

    def place(self, *where: str | int) -> str:
        for depth in range(len(where), 0, -1):
            if self.numbers.get(where[:depth]) == 0:
                return f"--set {'.'.join(map(str, where[:depth]))}"
        return super().place(*where)


def override(data: dict[str, Any], lines: Lines, overrides: Sequence[str]) -> tuple[dict[str, Any], Lines]:
    """Sets keys of a run file as `--set` says.

    Args:
        data: the run file; changed.
        overrides: `a.b=value` texts; each value is read as YAML.

    Returns:
        The run file, and the places of its keys: of those set, the command line.

    Raises:
        UsageError: a text that is no `key=value`.
    """
    numbers = dict(lines.numbers)
    for text in overrides:
        dotted, equals, value = text.partition("=")
        keys = tuple(dotted.strip().split("."))
        if not equals or not all(keys):
            raise UsageError(f"--set {text}: expected key=value", "For instance: --set batch.micro=4")
        try:
            parsed = read_value(value)
        except ValueError:
            raise UsageError(f"--set {text}: `{value}` is not a YAML value") from None
        # 0 is no line: `_Places` shows the command line instead.
        here = data
        for depth, key in enumerate(keys[:-1], start=1):
            if not isinstance(here.get(key), dict):
                here[key] = {}
                numbers[keys[:depth]] = 0
            here = here[key]
        here[keys[-1]] = parsed
        numbers = {where: n for where, n in numbers.items() if where[: len(keys)] != keys} | {keys: 0}
    return data, _Places(lines.path, numbers)
