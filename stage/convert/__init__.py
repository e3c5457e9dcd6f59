"""Other formats -> parquet, at stage time, so that the cluster has one format to read.

Bounded memory: batches stream from reader to writer, whatever the files' sizes. Deterministic: the same files and the
same pyarrow give the same bytes (parquet files name the library that wrote them, and its encoders change: another
pyarrow may give other bytes of the same rows). Nothing of the input is run: not even a pickle's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stage.convert.kinds import METADATA_FILES, is_image
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
}
_COMPRESSED = (".gz", ".bz2", ".zst")


@dataclass(frozen=True)
class Split:
    """One split made: its parquet files in order, and which files it was made of, in words."""

    shards: tuple[Path, ...]
    origin: str


def convert(
    how: str,
    files: Mapping[str, Path],
    splits_of: Callable[[Sequence[str]], Mapping[str, list[str]]],
    target: Path,
    what: str,
    separator: str | None = None,
) -> dict[str, Split]:
    """Converts files to parquet, `target/<split>-00000-of-0000N.parquet`.

    Args:
        how: one of `request.CONVERSIONS`.
        files: relative POSIX path -> where it lies.
        splits_of: the splits that names tell; used by every format but `cifar`, which knows its own.
        separator: between the cells of a CSV; None: as the files' endings say.

    Raises:
        UsageError: nothing here of that format, or rows that do not fit together.
        DamageError, PolicyError: a file that is not what its name says; a pickle that wants to build something.
    """
    if how == "cifar":
        from stage.convert import cifar

        return _write(how, cifar.splits(files, what), target)
    return convert_splits(how, files, splits_of(chosen(how, files, what)), target, what, separator)


def convert_splits(
    how: str,
    files: Mapping[str, Path],
    splits: Mapping[str, list[str]],
    target: Path,
    what: str,
    separator: str | None = None,
    features: Any = None,
    tell: Callable[[str], None] = lambda said: None,
) -> dict[str, Split]:
    """Converts files that are known to be of a format, split by split.

    Args:
        splits: split -> paths in order.
        separator: between the cells of a CSV; None: as the files' endings say.
        features: what a card says of the columns (`labels.declared`).
        tell: hears which class names of the card are taken, and which are not.

    Raises:
        StageError: as for `convert`.
    """
    from stage.convert import images, labels, readers

    classes = labels.declared(features, tell)
    if how == "imagefolder":
        pictures = images.parts(files, splits, what)
        labels.tell_of_images(next(iter(pictures.values()))[0], classes, tell)
        return _write(how, pictures, target)
    groups = {split: [(path, files[path]) for path in paths] for split, paths in splits.items()}
    schema = readers.common_schema(how, [pair for group in groups.values() for pair in group], what, separator)

    def rows(group: list[tuple[str, Path]]) -> Iterator[pa.RecordBatch]:
        return readers.rows_of(how, group, schema, what, separator)

    fitting = labels.fitting(schema, classes, lambda: chain.from_iterable(map(rows, groups.values())), tell)
    final = labels.labelled_schema(schema, fitting) if fitting else schema
    parts = {
        split: (
            final,
            labels.labelled(rows(group), final, fitting) if fitting else rows(group),
            [name for name, _ in group],
        )
        for split, group in groups.items()
    }
    return _write(how, parts, target)


def _write(
    how: str, parts: Mapping[str, tuple[pa.Schema, Iterator[pa.RecordBatch], list[str]]], target: Path
) -> dict[str, Split]:
    from stage.convert.writer import write_split

    target.mkdir(parents=True)
    made = {}
    for split, (schema, rows, paths) in parts.items():
        shards = write_split(schema, rows, target, split)
        more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
        made[split] = Split(tuple(shards), f"{how}: {paths[0]}{more}")
    return made


def chosen(how: str, files: Collection[str], what: str) -> list[str]:
    """The files of the format asked for: by their suffixes; a single file is taken at its word.

    Args:
        files: relative POSIX paths.

    Raises:
        UsageError: there is none.
    """
    if how == "cifar":  # knows its files by their names
        return sorted(files)
    if how == "imagefolder":
        visible = [path for path in sorted(files) if not _is_hidden(path)]
        return [path for path in visible if is_image(path) or path.rpartition("/")[2] in METADATA_FILES] or visible
    if len(files) == 1:
        return list(files)
    found = [path for path in sorted(files) if _bare(path).endswith(_SUFFIXES[how]) and not _is_hidden(path)]
    if not found:
        raise UsageError(
            f"{what}: `convert: {how}`: none of the {len(files)} files ends in {' or '.join(_SUFFIXES[how])}.",
            f"There are: {', '.join(sorted(files)[:6])}{', ...' if len(files) > 6 else ''}",
        )
    return found


def _bare(path: str) -> str:
    path = path.lower()
    return next((path.removesuffix(suffix) for suffix in _COMPRESSED if path.endswith(suffix)), path)


def _is_hidden(path: str) -> bool:
    return any(part.startswith((".", "__")) for part in path.split("/"))
