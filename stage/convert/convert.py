"""Converts other formats to parquet on the laptop, so that the cluster reads a single format.

Memory is bounded: batches stream from reader to writer, whatever the sizes of the files. The output
is deterministic: the same files, pyarrow and Python give the same bytes (`made_with`; encoders
change). No code in the input is run, not even in a pickle.
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from stage.convert.formats import (
    METADATA_FILES,
    READ_COMPRESSED,
    conversion_of,
    is_image,
    is_model,
    is_skipped,
)
from stage.errors import UsageError

if TYPE_CHECKING:
    import pyarrow as pa

CONFIG = "default"
_SUFFIXES = {
    "csv": (".csv", ".tsv"),
    "json": (".json",),
    "jsonl": (".jsonl", ".ndjson", ".json"),
    "text": (".txt",),
    "arrow": (".arrow", ".feather", ".ipc"),
    "parquet": (".parquet",),
}


@dataclass(frozen=True)
class Split:
    """A converted split.

    Attributes:
        shards: its parquet files, in order.
        origin: names the files that it is made from. It is part of the lock.
    """

    shards: tuple[Path, ...]
    origin: str


def made_with() -> dict[str, str]:
    """The versions here of what decides the bytes of converted files."""
    import pyarrow as pa

    python = ".".join(platform.python_version_tuple()[:2])
    return {"pyarrow": pa.__version__, "python": python}


def convert(
    how: str,
    files: Mapping[str, Path],
    splits_of: Callable[[Sequence[str]], Mapping[str, list[str]]],
    target: Path,
    separator: str | None = None,
    note: Callable[[str], None] = lambda line: None,
) -> dict[str, Split]:
    """Converts files to parquet, `target/<split>-00000-of-0000N.parquet`.

    Args:
        how: one of `stage.lock.requests.CONVERSIONS`.
        files: relative POSIX path -> the file.
        splits_of: returns the splits, by the names of files; not used for `cifar`.
        target: a new folder.
        separator: between the cells of a CSV; None: as the suffixes of the files say.
        note: called with a line for each column that `load_dataset` would read otherwise, for each
            of a CSV that begins with numbers and is text, and for a file in two splits.

    Raises:
        UsageError: no file of that format, or rows that do not fit together.
        DamageError: a file that is not of that format.
        PolicyError: a pickle that would build more than plain data.
    """
    splits = {} if how == "cifar" else splits_of(chosen(how, files))
    return convert_splits(how, files, splits, target, separator, note)


def convert_splits(
    how: str,
    files: Mapping[str, Path],
    splits: Mapping[str, list[str]],
    target: Path,
    separator: str | None = None,
    note: Callable[[str], None] = lambda line: None,
) -> dict[str, Split]:
    """Converts files of a known format, split by split.

    Args:
        how, files, target, separator, note: as for `convert`.
        splits: split -> paths, in order; not used for `cifar`.

    Raises:
        StageError: as for `convert`.
    """
    from stage.convert import images, readers

    target.mkdir(parents=True)
    for path, count in Counter(path for paths in splits.values() for path in paths).items():
        if count > 1:
            both = " and ".join(split for split in splits if path in splits[split])
            note(f"{path} is in {both}, as with `load_dataset`: its rows are in each")
    if how == "cifar":
        return _write(how, images.cifar_parts(files), target)
    with TemporaryDirectory(dir=target, prefix="cells-") as scratch:
        if how == "imagefolder":
            return _write(how, images.parts(files, splits, Path(scratch)), target)
        groups = {split: [(path, files[path]) for path in paths] for split, paths in splits.items()}
        every = [pair for group in groups.values() for pair in group]
        table = readers.Table(how, every, Path(scratch), separator, note)
        parts = {
            split: (table.schema, table.rows(group), splits[split])
            for split, group in groups.items()
        }
        return _write(how, parts, target)


def _write(
    how: str,
    parts: Mapping[str, tuple[pa.Schema, Iterator[pa.RecordBatch], list[str]]],
    target: Path,
) -> dict[str, Split]:
    from stage.convert.parquet_writer import write_split

    made = {}
    for split, (schema, rows, paths) in parts.items():
        more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
        shards = write_split(schema, rows, target, split)
        made[split] = Split(tuple(shards), f"{how}: {paths[0]}{more}")
    return made


def chosen(how: str, files: Collection[str]) -> list[str]:
    """The files of a format, by their suffixes. A single file is accepted with any suffix.

    Args:
        how: one of `stage.lock.requests.CONVERSIONS`.
        files: relative POSIX paths.

    Raises:
        UsageError: there is none, or the folder is a model's.
    """
    if is_model(files):
        raise UsageError(
            f"`convert: {how}`: this is a model's folder, not rows of data.",
            "Remove `convert`: a model is taken as it is.",
        )
    visible = [path for path in sorted(files) if not is_skipped(path)]
    if how == "cifar":  # `images.cifar_parts` finds its files by their names
        return sorted(files)
    if how == "imagefolder":
        return [
            path for path in visible if is_image(path) or path.rpartition("/")[2] in METADATA_FILES
        ] or visible
    if len(files) == 1:
        return list(files)
    found = [path for path in visible if _without_compression(path).endswith(_SUFFIXES[how])]
    if not found:
        other = conversion_of(files)
        raise UsageError(
            f"`convert: {how}`: no file ends in {' or '.join(_SUFFIXES[how])}.",
            (f"Write `convert: {other}`. " if other not in (None, how) else "")
            + f"There are: {', '.join(sorted(files)[:6])}{', ...' if len(files) > 6 else ''}",
        )
    return found


def _without_compression(path: str) -> str:
    path = path.lower()
    return next(
        (path.removesuffix(suffix) for suffix in READ_COMPRESSED if path.endswith(suffix)), path
    )
