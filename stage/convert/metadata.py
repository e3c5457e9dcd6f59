"""What metadata files tell of images: the rows of `metadata.csv`, `.jsonl` or `.parquet`, with the images they name.

As `datasets`' folder_based_builder reads them: `file_name` becomes `image`, `x_file_name` becomes `x`, `file_names` a
list; paths are relative to the metadata file and stay below it. Images that no row names are not in the dataset.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from stage.convert import readers
from stage.convert.images import BATCH_BYTES, IMAGE, Parts, read_image, with_features
from stage.errors import UsageError

_FEATURE: Mapping[str, Any] = {"_type": "Image"}


def parts(
    files: Mapping[str, Path], images: Mapping[str, Sequence[str]], told: Mapping[str, Sequence[str]], what: str
) -> Parts:
    """The splits that metadata files describe.

    Args:
        images: split -> its images.
        told: split -> its metadata files.

    Raises:
        UsageError: metadata without `file_name`, of several kinds, naming what is not there, or missing in a split.
    """
    every = [path for paths in told.values() for path in paths]
    kinds = sorted({path.rpartition(".")[2] for path in every})
    if len(kinds) > 1:
        raise UsageError(
            f"{what}: `imagefolder`: there are both metadata.{kinds[0]} and metadata.{kinds[1]}.", "Keep one kind."
        )
    for split, paths in images.items():
        if paths and not told[split]:
            raise UsageError(
                f"{what}: `imagefolder`: the split `{split}` has images and no metadata.{kinds[0]}; others have one.",
                "Give every split its own, beside its images.",
            )
    schema = readers.common_schema(kinds[0], [(path, files[path]) for path in every], what)
    named = _named_columns(schema, f"{what}: {every[0]}")
    fields = [_field(field, named) for field in schema]
    features = {name: _feature(field) for field in schema if (name := named.get(field.name))}
    target = with_features(pa.schema(fields), features)
    return {
        split: (target, _rows(paths, kinds[0], schema, target, named, files, what), [*paths, *images[split]])
        for split, paths in told.items()
        if paths
    }


def _named_columns(schema: pa.Schema, where: str) -> dict[str, str]:
    """Column that names images -> the column that holds them."""
    named = {}
    for field in schema:
        for ending, alone, fits in (("file_name", "image", _is_text), ("file_names", "images", _is_list_of_text)):
            if fits(field.type) and (field.name == ending or field.name.endswith(f"_{ending}")):
                named[field.name] = field.name.removesuffix(ending).removesuffix("_") or alone
    if not named:
        raise UsageError(
            f"{where}: no column `file_name`, so it says nothing of any image.",
            "Name the column that holds the images' paths `file_name`; or leave the file out.",
        )
    columns = [named.get(name, name) for name in schema.names]
    if twice := sorted({column for column in columns if columns.count(column) > 1}):
        raise UsageError(f"{where}: there would be two columns `{twice[0]}`.", "Rename the one that is no image.")
    return named


def _is_text(type_: pa.DataType) -> bool:
    return bool(pa.types.is_string(type_) or pa.types.is_large_string(type_))


def _is_list_of_text(type_: pa.DataType) -> bool:
    return isinstance(type_, pa.ListType | pa.LargeListType) and _is_text(type_.value_type)


def _field(field: pa.Field, named: Mapping[str, str]) -> pa.Field:
    if field.name not in named:
        return field
    return pa.field(named[field.name], IMAGE if _is_text(field.type) else pa.list_(IMAGE))


def _feature(field: pa.Field) -> Mapping[str, Any]:
    return _FEATURE if _is_text(field.type) else {"feature": _FEATURE, "_type": "List"}


def _rows(
    paths: Sequence[str],
    kind: str,
    schema: pa.Schema,
    target: pa.Schema,
    named: Mapping[str, str],
    files: Mapping[str, Path],
    what: str,
) -> Iterator[pa.RecordBatch]:
    for path in paths:
        folder = path.rpartition("/")[0]
        for batch in readers.rows_of(kind, [(path, files[path])], schema, what):
            start, size = 0, 0
            images: dict[str, list[Any]] = {column: [] for column in named}
            for row in range(batch.num_rows):
                for column, values in images.items():
                    value = batch.column(column)[row].as_py()
                    values.append(_with_bytes(value, folder, files, f"{what}: {path}: row {row + 1}"))
                    size += _size(values[-1])
                if size >= BATCH_BYTES or row + 1 == batch.num_rows:
                    yield _batch(batch.slice(start, row + 1 - start), images, target)
                    start, size = row + 1, 0
                    images = {column: [] for column in named}


def _batch(rows: pa.RecordBatch, images: Mapping[str, list[Any]], target: pa.Schema) -> pa.RecordBatch:
    columns = [
        pa.array(images[name], field.type) if name in images else rows.column(name)
        for name, field in zip(rows.schema.names, target, strict=True)
    ]
    return pa.record_batch(columns, schema=target)


def _with_bytes(value: Any, folder: str, files: Mapping[str, Path], where: str) -> Any:
    """The image, or images, that a cell names; null stays null."""
    if value is None:
        return None
    if isinstance(value, list):
        return [_with_bytes(item, folder, files, where) for item in value]
    path = posixpath.normpath(posixpath.join(folder, value.replace("\\", "/")))
    if not value or path not in files or posixpath.isabs(value) or not f"{path}/".startswith(f"{folder}/".lstrip("/")):
        raise UsageError(
            f"{where}: it names the image {value!r}, which is not below the metadata file.",
            "Paths are relative to the folder the metadata file lies in.",
        )
    return read_image(path, files[path], where)


def _size(value: Any) -> int:
    if isinstance(value, list):
        return sum(map(_size, value))
    return len(value["bytes"]) if value else 0
