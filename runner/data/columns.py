"""Whether the columns of a dataset are what a task reads: names and Arrow types, before a row is opened. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from runner.data_config import DatasetConfig
from runner.errors import UsageError


def is_text(kind: str) -> bool:
    """`string` and its kin."""
    return kind in ("string", "large_string", "string_view")


def is_integer(kind: str) -> bool:
    """A whole number of any width."""
    return kind.removeprefix("u") in ("int8", "int16", "int32", "int64")


def _is_printable(kind: str) -> bool:
    return is_text(kind) or is_integer(kind) or kind in ("float", "double", "bool")


def _is_image(kind: str) -> bool:
    """A struct with the image file's bytes, as `datasets` and our conversions write it; or the bytes alone."""
    return kind in ("binary", "large_binary") or (kind.startswith("struct<") and "bytes: " in kind)


def _is_messages(kind: str) -> bool:
    return kind.startswith(("list<", "large_list<")) and "role: " in kind and "content: " in kind


# Key of the run file -> what its column must hold, in words and as a rule.
_WANTED: dict[str, tuple[str, Callable[[str], bool]]] = {
    "text": ("text", is_text),
    "prompt": ("text", is_text),
    "response": ("text", is_text),
    "format": ("text or numbers", _is_printable),
    "messages": ("lists of {role, content}", _is_messages),
    "image": ("images ({bytes, path})", _is_image),
    "label": ("integers", is_integer),
}


def check_columns(
    task: str, dataset: DatasetConfig, columns: Mapping[str, str], split: str, where: Callable[[str], str]
) -> None:
    """Refuses a split that lacks a column, or has it of another type.

    Args:
        columns: name -> Arrow type, of the split.
        where: key of the dataset -> how to name it to the user.

    Raises:
        UsageError: naming the columns there are.
    """
    for told, column in dataset.columns(task).items():
        key = told.partition(":")[0]
        words, holds = _WANTED[key]
        if column not in columns:
            raise UsageError(
                f"{where(told if key == 'format' else f'{key}: {column}')}: the split `{split}` of `{dataset.asset}` "
                "has no such column.",
                f"Its columns: {', '.join(f'{c} ({t})' for c, t in columns.items())}.",
            )
        if not holds(columns[column]):
            fitting = ", ".join(c for c, t in columns.items() if holds(t)) or "none"
            raise UsageError(
                f"{where(f'{key}: {column}')}: that column of `{dataset.asset}` holds {columns[column]}, not {words}.",
                f"Columns of {words}: {fitting}." + _LABEL_HINT.get(key, ""),
            )


_LABEL_HINT = {"label": " Number the classes from 0 when you make the dataset."}


def place_of(path: Path, number: int | None) -> Callable[[str], str]:
    """Names a key of the only dataset, or of one of several, in messages."""
    inside = "dataset" if number is None else f"datasets[{number}]"
    return lambda key: f"{path}: `{inside}.{key}`"
