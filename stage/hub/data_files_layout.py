"""Finds config, split and format of each file of a dataset repository without parquet: pure rules.

They are those of `datasets` (data_files.py, load.py, packaged_modules): the card's `configs`
decide, else the names of folders and files; the format is the one that most files have. Where
the library would read a file in a way that our conversion does not know (an option in the card,
a foreign format), the result is a described problem, never a guess.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stage.convert.formats import (
    CONVERTED,
    conversion,
    endings,
    format_of,
    is_data,
    is_hidden,
    is_of,
)
from stage.hub.parquet_layout import (
    config_name,
    declared_splits,
    entries,
    splits_of_names,
)

_READ_COMPRESSED = (".gz", ".bz2", ".zst")
_UNREAD_COMPRESSED = (".xz", ".lz4", ".7z", ".rar", ".lzma", ".zip")
# Options of a card's config that change the rows; the conversion knows `sep` and `delimiter`.
_CHANGES_ROWS = """
column_names comment converters date_format decimal dialect doublequote drop_labels drop_metadata
encoding encoding_errors escapechar features field filters header index_col keep_default_na
keep_linebreaks lineterminator metadata_filenames na_filter na_values names nrows on_bad_lines
on_mixed_types parse_agent_traces prefix quotechar quoting sample_by skip_blank_lines skipfooter
skipinitialspace skiprows thousands true_values false_values usecols"""


@dataclass(frozen=True)
class Originals:
    """A config as the repository publishes it, not as parquet.

    Attributes:
        convert: the conversion that makes parquet of it, one of `requests.CONVERSIONS`.
        splits: split -> paths in order.
        separator: between the cells of its CSV, where the card names one.
        problem: describes why it cannot be converted here; None: it can.
    """

    convert: str = ""
    splits: Mapping[str, list[str]] = field(default_factory=dict)
    separator: str | None = None
    problem: str | None = None


def originals(configs: Any, paths: Sequence[str]) -> dict[str, Originals]:
    """Config -> its files, for each config with files of a format that `datasets` knows.

    Args:
        configs: as for `parquet_layout.from_card`.
        paths: all files of the repository.
    """
    known = [path for path in paths if is_data(path)]
    visible = [path for path in known if not is_hidden(path)]
    found = {}
    for entry in entries(configs):
        if splits := declared_splits(entry, [*visible, *_named(entry, known)], visible):
            found[config_name(entry)] = _of_one_format(splits, entry)
    if not entries(configs) and visible:
        found["default"] = _of_one_format(splits_of_names(visible), {})
    return found


def loading_script(repository: str, paths: Iterable[str]) -> str | None:
    """The Python file that generates the dataset, if there is one: `name.py` at the top."""
    script = f"{repository.rpartition('/')[2]}.py"
    return script if script in paths else None


def _of_one_format(splits: Mapping[str, list[str]], entry: Mapping[str, Any]) -> Originals:
    formats = {split: format_of(paths) for split, paths in splits.items()}
    found = sorted({format for format in formats.values() if format})
    if len(found) > 1:
        return Originals(problem=f"its splits are in different formats ({', '.join(found)})")
    if not found or found[0] not in CONVERTED:
        return Originals(problem=f"its files are {found[0] if found else 'of no known format'}")
    format = found[0]
    chosen = {
        split: [path for path in paths if is_of(format, path)] for split, paths in splits.items()
    }
    every = [path for paths in chosen.values() for path in paths]
    return Originals(
        convert=conversion(format, every),
        splits={split: paths for split, paths in chosen.items() if paths},
        separator=_separator(entry),
        problem=_problem(format, every, entry),
    )


def _problem(format: str, paths: Sequence[str], entry: Mapping[str, Any]) -> str | None:
    readable = () if format in ("arrow", "imagefolder") else _READ_COMPRESSED
    for path in paths:
        ending = endings(path)[-1]
        if ending in (*_READ_COMPRESSED, *_UNREAD_COMPRESSED) and ending not in readable:
            return f"{path} is compressed in a way that stage cannot read"
    is_utf8 = str(entry.get("encoding", "utf-8")).lower() in ("utf-8", "utf8")
    options = sorted(
        key for key in entry if key in _CHANGES_ROWS.split() and not (key == "encoding" and is_utf8)
    )
    if options:
        return (
            f"its card asks for `{options[0]}: {entry[options[0]]}`, which stage does not support"
        )
    separator = _separator(entry)
    if separator is not None and len(separator.encode()) != 1:
        return f"its card asks for the separator {separator!r}, which is not one character"
    return None


def _separator(entry: Mapping[str, Any]) -> str | None:
    value = entry.get("delimiter", entry.get("sep"))
    return None if value is None else str(value)


def _named(entry: Mapping[str, Any], paths: Sequence[str]) -> list[str]:
    """Hidden files whose hidden parts an entry's patterns name."""
    text = str(entry.get("data_files"))
    return [
        p
        for p in paths
        if is_hidden(p) and all(part in text for part in p.split("/") if is_hidden(part))
    ]
