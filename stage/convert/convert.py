"""Converts other formats to parquet on the laptop, so that the cluster reads a single format.

Memory is bounded: batches stream from reader to writer, whatever the sizes of the files. The output
is deterministic: the same files and the same pyarrow give the same bytes (another pyarrow may give
other bytes for the same rows, because its encoders change). No code in the input is run, not even
in a pickle.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stage.convert.formats import METADATA_FILES, conversion_of, is_hidden, is_image, is_model
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
_COMPRESSED = (".gz", ".bz2", ".zst")


@dataclass(frozen=True)
class Split:
    """A converted split.

    Attributes:
        shards: its parquet files, in order.
        origin: names the files that it is made from. It is part of the lock.
    """

    shards: tuple[Path, ...]
    origin: str


def convert(
    how: str,
    files: Mapping[str, Path],
    splits_of: Callable[[Sequence[str]], Mapping[str, list[str]]],
    target: Path,
    what: str,
    separator: str | None = None,
    note: Callable[[str], None] = lambda line: None,
) -> dict[str, Split]:
    """Converts files to parquet, `target/<split>-00000-of-0000N.parquet`.

    Args:
        how: one of `stage.lock.requests.CONVERSIONS`.
        files: relative POSIX path -> the file.
        splits_of: returns the splits, by the names of files; not used for `cifar`.
        target: a new folder.
        what: names the asset in messages.
        separator: between the cells of a CSV; None: as the suffixes of the files say.
        note: called with a line for each column of a CSV that begins with numbers and is text.

    Raises:
        UsageError: no file of that format, or rows that do not fit together.
        DamageError: a file that is not of that format.
        PolicyError: a pickle that would build more than plain data.
    """
    if how == "cifar":
        from stage.convert import cifar

        return _write(how, cifar.splits(files, what), target)
    return convert_splits(
        how, files, splits_of(chosen(how, files, what)), target, what, separator, note=note
    )


def convert_splits(
    how: str,
    files: Mapping[str, Path],
    splits: Mapping[str, list[str]],
    target: Path,
    what: str,
    separator: str | None = None,
    features: Any = None,
    note: Callable[[str], None] = lambda line: None,
) -> dict[str, Split]:
    """Converts files of a known format, split by split.

    Args:
        how, files, target, what, separator: as for `convert`.
        splits: split -> paths, in order.
        features: the columns as a dataset card describes them (`class_labels.declared`).
        note: called with lines about the class names of the card, and as for `convert`.

    Raises:
        StageError: as for `convert`.
    """
    from stage.convert import class_labels, images, readers

    classes = class_labels.declared(features, note)
    if how == "imagefolder":
        pictures = images.parts(files, splits, what)
        class_labels.note_image_classes(next(iter(pictures.values()))[0], classes, note)
        return _write(how, pictures, target)
    groups = {split: [(path, files[path]) for path in paths] for split, paths in splits.items()}
    schema = readers.common_schema(
        how, [pair for group in groups.values() for pair in group], what, separator, note
    )
    if how == "parquet":
        schema = readers.with_classes_of(next(iter(files.values())), schema)

    def rows(group: list[tuple[str, Path]]) -> Iterator[pa.RecordBatch]:
        return readers.rows_of(how, group, schema, what, separator)

    fitting = class_labels.fitting(
        schema, classes, lambda: chain.from_iterable(map(rows, groups.values())), note
    )
    final = class_labels.labelled_schema(schema, fitting) if fitting else schema
    parts = {
        split: (
            final,
            class_labels.labelled(rows(group), final, fitting) if fitting else rows(group),
            [name for name, _ in group],
        )
        for split, group in groups.items()
    }
    return _write(how, parts, target)


def _write(
    how: str,
    parts: Mapping[str, tuple[pa.Schema, Iterator[pa.RecordBatch], list[str]]],
    target: Path,
) -> dict[str, Split]:
    from stage.convert.parquet_writer import write_split

    target.mkdir(parents=True)
    made = {}
    for split, (schema, rows, paths) in parts.items():
        shards = write_split(schema, rows, target, split)
        more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
        made[split] = Split(tuple(shards), f"{how}: {paths[0]}{more}")
    return made


def chosen(how: str, files: Collection[str], what: str) -> list[str]:
    """The files of a format, by their suffixes. A single file is accepted with any suffix.

    Args:
        how: one of `stage.lock.requests.CONVERSIONS`.
        files: relative POSIX paths.
        what: names the asset in messages.

    Raises:
        UsageError: there is none, or the folder is a model's.
    """
    if is_model(files):
        raise UsageError(
            f"{what}: `convert: {how}`: this is a model's folder, not rows of data.",
            "Remove `convert`: a model is taken as it is.",
        )
    if how == "cifar":  # `cifar.splits` finds its files by their names
        return sorted(files)
    if how == "imagefolder":
        visible = [path for path in sorted(files) if not is_hidden(path)]
        return [
            path for path in visible if is_image(path) or path.rpartition("/")[2] in METADATA_FILES
        ] or visible
    if len(files) == 1:
        return list(files)
    found = [
        path
        for path in sorted(files)
        if _bare(path).endswith(_SUFFIXES[how]) and not is_hidden(path)
    ]
    if not found:
        other = conversion_of(files)
        raise UsageError(
            f"{what}: `convert: {how}`: no file ends in {' or '.join(_SUFFIXES[how])}.",
            (f"Write `convert: {other}`. " if other not in (None, how) else "")
            + f"There are: {', '.join(sorted(files)[:6])}{', ...' if len(files) > 6 else ''}",
        )
    return found


def _bare(path: str) -> str:
    path = path.lower()
    return next(
        (path.removesuffix(suffix) for suffix in _COMPRESSED if path.endswith(suffix)), path
    )
