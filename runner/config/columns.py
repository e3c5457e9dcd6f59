"""Checks that a dataset has the columns that a task reads, by names and Arrow types. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Set

from runner.config.chats import OURS, Naming
from runner.config.data import DatasetConfig
from runner.errors import Lines, Mistakes, UsageError, suggest


def is_text(kind: str) -> bool:
    """Returns whether an Arrow type is a text."""
    return kind in ("string", "large_string", "string_view")


def is_integer(kind: str) -> bool:
    """Returns whether an Arrow type is a whole number of any width."""
    return kind.removeprefix("u") in ("int8", "int16", "int32", "int64")


def _is_printable(kind: str) -> bool:
    return is_text(kind) or is_integer(kind) or kind in ("float", "double", "bool")


def _is_image(kind: str) -> bool:
    """Returns whether an Arrow type holds image files.

    It is a struct with the file's bytes, as `datasets` and our conversions write it, or the bytes.
    """
    return kind in ("binary", "large_binary") or (kind.startswith("struct<") and "bytes: " in kind)


def _is_messages(kind: str) -> bool:
    return Naming.of(kind, {}, {}) is not None


def _is_class(kind: str) -> bool:
    return is_integer(kind) or is_text(kind)


def _in_lists(fits: Callable[[str], bool]) -> Callable[[str], bool]:
    """Returns whether an Arrow type is a list of what fits."""

    def fit(kind: str) -> bool:
        inner = re.fullmatch(r"(?:large_)?list<\w+: (\w+)(?: not null)?>", kind)
        return inner is not None and fits(inner[1])

    return fit


GLUE = (
    ("premise", "hypothesis"),
    ("sentence1", "sentence2"),
    ("question1", "question2"),
    ("question", "sentence"),
    ("sentence",),
)
"""The columns of GLUE's configurations (arXiv:1804.07461), pairs before single texts."""

# Key of the run file, or task and key -> what its column must hold: a description, and a test of
# the Arrow type.
_EXPECTED: dict[str, tuple[str, Callable[[str], bool]]] = {
    "text": ("text", is_text),
    "prompt": ("text", is_text),
    "response": ("text", is_text),
    "format": ("text or numbers", _is_printable),
    "messages": ("lists of {role, content}, {from, value} or {human, assistant}", _is_messages),
    "image": ("images ({bytes, path})", _is_image),
    "label": ("integers", is_integer),
    "text-classification: label": ("integers or texts", _is_class),
    "pair": ("text", is_text),
    "words": ("lists of texts", _in_lists(is_text)),
    "tags": ("lists of integers or texts", _in_lists(_is_class)),
}


def _expected(task: str, key: str) -> tuple[str, Callable[[str], bool]]:
    return _EXPECTED.get(f"{task}: {key}") or _EXPECTED[key]


def fitting(task: str, key: str, columns: Mapping[str, str]) -> list[str]:
    """Returns the columns of a split that can be the value of a key such as `text`.

    Args:
        task: as in the run file.
        columns: name -> Arrow type.
    """
    _, fits = _expected(task, key)
    return [name for name, kind in columns.items() if fits(kind)]


def check_columns(
    task: str,
    dataset: DatasetConfig,
    columns: Mapping[str, str],
    split: str,
    where: Callable[[str], str],
    mistakes: Mistakes,
    unknown: Set[str] = frozenset(),
) -> None:
    """Finds the columns of a split that are missing or have another type.

    Args:
        task: as in the run file.
        dataset: what the run file sets for the dataset.
        columns: name -> Arrow type, of the split.
        split: name of the split.
        where: key of the dataset -> its name in messages.
        mistakes: keeps what is found, as UsageErrors that list the columns.
        unknown: keys of the dataset whose values are not known; they are not checked.
    """
    for named, column in dataset.columns(task).items():
        if named.partition(":")[0] in unknown or not column:  # missing: found without a bundle
            continue
        with mistakes:
            _check_column(task, dataset, (named, column), columns, split, where)


def _check_column(
    task: str,
    dataset: DatasetConfig,
    named: tuple[str, str],
    columns: Mapping[str, str],
    split: str,
    where: Callable[[str], str],
) -> None:
    """Refuses one column: `named` is its key in the run file, and its name."""
    name, column = named
    key = name.partition(":")[0]
    expected, fits = _expected(task, key)
    if key == "messages" and dataset.fields:
        expected, fits = _renamed(dataset)
    if column not in columns:
        raise UsageError(
            f"{where(name if key == 'format' else f'{key}: {column}')}: "
            f"the split `{split}` of `{dataset.asset}` has no such column.",
            suggest(
                column,
                columns,
                f"Its columns: {', '.join(f'{c} ({t})' for c, t in columns.items())}."
                + _texts_hint(task, key, columns),
            ),
        )
    if not fits(columns[column]):
        others = ", ".join(name for name, kind in columns.items() if fits(kind)) or "none"
        raise UsageError(
            f"{where(f'{key}: {column}')}: that column of `{dataset.asset}` holds "
            f"{columns[column]}, not {expected}.",
            f"Columns of {expected}: {others}." + _label_hint(task, key, columns[column]),
        )


def _renamed(dataset: DatasetConfig) -> tuple[str, Callable[[str], bool]]:
    """What a column of messages must hold whose keys the run file renames."""
    names = [dataset.fields.get(name, name) for name in OURS]
    return (
        f"lists of {{{', '.join(names)}}}",
        lambda kind: Naming.of(kind, dataset.fields, {}) is not None,
    )


def _label_hint(task: str, key: str, kind: str) -> str:
    if key != "label":
        return ""
    if task == "text-classification" and kind in ("float", "double"):
        return " Numbers with fractions are scores: to learn them is no task here."
    return " Number the classes from 0 when you make the dataset."


def texts_in(columns: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the columns of the text, or of the pair of texts, if they have names of GLUE."""
    known = (pair for pair in GLUE if all(is_text(columns.get(name, "")) for name in pair))
    return next(known, ())


def _texts_hint(task: str, key: str, columns: Mapping[str, str]) -> str:
    found = texts_in(columns) if (task, key) == ("text-classification", "text") else ()
    keys = ", ".join(f"{k}: {c}" for k, c in zip(("text", "pair"), found, strict=False))
    return f" Set {keys}." if keys else ""


def place_of(lines: Lines, number: int | None) -> Callable[[str], str]:
    """Returns a function that names a key of a dataset, with file:line, in messages.

    Args:
        lines: the run file's line numbers.
        number: of the dataset in `datasets`; None: it is the only one.
    """
    inside = "dataset" if number is None else f"datasets[{number}]"
    where: tuple[str | int, ...] = ("dataset",) if number is None else ("datasets", number)
    return lambda key: f"{lines.place(*where, key.partition(':')[0])}: `{inside}.{key}`"
