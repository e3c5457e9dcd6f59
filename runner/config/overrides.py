"""`--set key=value`: sets keys of a run file on the command line.

(run file as YAML data, its lines, texts) -> (YAML data, lines). A message about such a value names
the command line instead of a line of the file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from runner.config.names_elsewhere import NAMES_ELSEWHERE
from runner.errors import Lines, UsageError, read_value


class _LinesAndOptions(Lines):
    """Line numbers of a run file. The number 0 means that `--set` gave the value."""

    def place(self, *where: str | int) -> str:
        for depth in range(len(where), 0, -1):
            if self.numbers.get(where[:depth]) == 0:
                return f"--set {'.'.join(map(str, where[:depth]))}"
        return super().place(*where)


_LENGTHS: Mapping[tuple[str, ...], str] = {("steps",): "epochs", ("epochs",): "steps"}


def override(
    data: dict[str, Any], lines: Lines, overrides: Sequence[str]
) -> tuple[dict[str, Any], Lines]:
    """Sets keys of a run file to the values of `--set`.

    Args:
        data: the run file; it is changed.
        lines: its line numbers.
        overrides: `a.b=value` texts; each value is read as YAML.

    Returns:
        The run file, and its line numbers with the command line for the keys that were set.

    A text that is not `key=value` is kept in `lines.mistakes`. `steps` replaces `epochs` of the
    file, and the other way round: they are two ways to say one thing.
    """
    numbers = dict(lines.numbers)
    for text in overrides:
        with lines.mistakes:
            keys, parsed = _key_and_value(text)
            here = data
            for depth, key in enumerate(keys[:-1], start=1):
                if not isinstance(here.get(key), dict):
                    here[key] = {}
                    numbers[keys[:depth]] = 0
                here = here[key]
            here[keys[-1]] = parsed
            others = {where: n for where, n in numbers.items() if where[: len(keys)] != keys}
            numbers = others | {keys: 0}
            replaced = _LENGTHS.get(keys)
            if replaced and parsed is not None and numbers.get((replaced,)) != 0:
                data.pop(replaced, None)
                numbers.pop((replaced,), None)
    return data, _LinesAndOptions(lines.path, numbers, mistakes=lines.mistakes)


_KEYS = ("epochs", "steps", "seed", "precision", "sequence_length", "compile", "lora", "task")
_SHORT = {
    "engine": "engine.name",
    "nodes": "slurm.nodes",
    "optimizer": "optimizer.name",
    "time": "slurm.time",
    "zero": "engine.zero",
}


def key_of_option(option: str) -> str | None:
    """The key of the run file that somebody gave as an option: `epochs` for `--epochs`."""
    name = option.lstrip("-").replace("-", "_")
    known = {key: key for key in _KEYS} | _SHORT | NAMES_ELSEWHERE
    return known.get(name)


def _key_and_value(text: str) -> tuple[tuple[str, ...], Any]:
    dotted, equals, value = text.partition("=")
    keys = tuple(dotted.strip().split("."))
    if not equals or not all(keys):
        raise UsageError(f"--set {text}: expected key=value.", "For instance: --set batch.micro=4")
    try:
        return keys, read_value(value)
    except ValueError:
        raise UsageError(
            f"--set {text}: `{value}` is not a YAML value.",
            f"Put text in two pairs of quotes: --set '{dotted}=\"...\"'",
        ) from None
