"""`--set key=value`: sets keys of a run file on the command line.

A message about such a value names the command line instead of a line of the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from runner.config.names_elsewhere import NAMES_ELSEWHERE
from runner.errors import Lines, UsageError, read_value

_LENGTHS = {"steps": "epochs", "epochs": "steps"}


def override(data: dict[str, Any], lines: Lines, overrides: Sequence[str]) -> None:
    """Sets keys of a run file's data to the values of `--set`.

    A text that is not `key=value` is kept in `lines.mistakes`. `steps` replaces `epochs` of the
    file, and the other way round: they are two ways to say one thing.

    Args:
        lines: of the file; they learn what the command line gave.
        overrides: `a.b=value` texts; each value is read as YAML.
    """
    for text in overrides:
        with lines.mistakes:
            keys, value = _key_and_value(text)
            lines.put(data, keys, value, f"--set {'.'.join(keys)}")
            other = _LENGTHS.get(".".join(keys))
            if other and value is not None and (other,) not in lines.elsewhere:
                lines.put(data, (other,), None, "")


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
        raise UsageError(
            "expected key=value.", "For instance: --set batch.micro=4", place=f"--set {text}"
        )
    try:
        return keys, read_value(value)
    except ValueError:
        raise UsageError(
            f"`{value}` is not a YAML value.",
            f"Put text in two pairs of quotes: --set '{dotted}=\"...\"'",
            place=f"--set {text}",
        ) from None
