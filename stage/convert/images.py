"""Converts a folder of images to splits with an `image` column, as `datasets`' imagefolder does.

With metadata files (`metadata.csv`, `.jsonl` or `.parquet`) beside the images, their rows are the
rows, as in `datasets`' folder_based_builder: `file_name` becomes `image`, `x_file_name` becomes
`x`, `file_names` a list. Paths are relative to the metadata file and stay below it. Images that no
row names are not in the dataset.

Without them the folders are the labels, if there are several and all images are equally deep; else
`image` is the only column. The metadata of the schema makes `datasets` decode the images; their
bytes do not change.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from stage.convert import readers
from stage.convert.class_labels import class_label_features, is_text, with_features
from stage.convert.formats import METADATA_FILES, is_image
from stage.errors import UsageError
from stage.files import human_size

MAX_IMAGE = 256 * 2**20  # bytes
BATCH_BYTES = 16 * 2**20
IMAGE = pa.struct([pa.field("bytes", pa.binary()), pa.field("path", pa.string())])
_FEATURE: Mapping[str, Any] = {"_type": "Image"}

# split -> its schema, its rows, the paths that they are made from
Parts = dict[str, tuple[pa.Schema, Iterator[pa.RecordBatch], list[str]]]


def image_schema(labels: Mapping[str, Sequence[str]]) -> pa.Schema:
    """A schema of `image` and label columns, with their meaning for `datasets`.

    Args:
        labels: label column -> the names of its classes.
    """
    columns = [pa.field("image", IMAGE), *(pa.field(column, pa.int64()) for column in labels)]
    return with_features(pa.schema(columns), {"image": _FEATURE, **class_label_features(labels)})


def read_image(path: str, file: Path, what: str) -> dict[str, bytes | str]:
    """A value of an image column.

    Args:
        path: of the image in the dataset; its last part is stored.
        file: the file to read.

    Raises:
        UsageError: it is larger than 256 MiB.
    """
    size = file.stat().st_size
    if size > MAX_IMAGE:
        raise UsageError(
            f"{what}: {path} has {human_size(size)}; an image may have {human_size(MAX_IMAGE)}.",
            "Make the image smaller, or remove it from the folder.",
        )
    return {"bytes": file.read_bytes(), "path": path.rpartition("/")[2]}


def parts(files: Mapping[str, Path], splits: Mapping[str, Sequence[str]], what: str) -> Parts:
    """The splits of a folder of images.

    Args:
        files: relative POSIX path -> the file.
        splits: split -> paths of its images and metadata files.
        what: names the asset in messages.

    Raises:
        UsageError: no images, or metadata that does not fit them.
    """
    images = {split: [path for path in paths if is_image(path)] for split, paths in splits.items()}
    if not any(images.values()):
        raise UsageError(
            f"{what}: `imagefolder`: no image in it.",
            "Images end in .png, .jpg, .webp and the like.",
        )
    if any(_is_metadata(path) for paths in splits.values() for path in paths):
        metadata = {
            split: [path for path in paths if _is_metadata(path)] for split, paths in splits.items()
        }
        return parts_of_metadata(files, images, metadata, what)
    every = [path for paths in images.values() for path in paths]
    folders = sorted({_folder(path) for path in every})
    has_labels = len(folders) > 1 and len({path.count("/") for path in every}) == 1
    schema = image_schema({"label": folders} if has_labels else {})
    numbers = {folder: number for number, folder in enumerate(folders)} if has_labels else None
    return {
        split: (schema, _rows(schema, numbers, paths, files, what), paths)
        for split, paths in images.items()
        if paths
    }


def _is_metadata(path: str) -> bool:
    return path.rpartition("/")[2] in METADATA_FILES


def _folder(path: str) -> str:
    return path.rpartition("/")[0].rpartition("/")[2]


def _rows(
    schema: pa.Schema,
    numbers: Mapping[str, int] | None,
    paths: Sequence[str],
    files: Mapping[str, Path],
    what: str,
) -> Iterator[pa.RecordBatch]:
    images: list[dict[str, bytes | str]] = []
    labels: list[int] = []
    size = 0

    def batch() -> pa.RecordBatch:
        columns = [
            pa.array(images, IMAGE),
            *([] if numbers is None else [pa.array(labels, pa.int64())]),
        ]
        return pa.record_batch(columns, schema=schema)

    for path in paths:
        images.append(read_image(path, files[path], what))
        labels += [] if numbers is None else [numbers[_folder(path)]]
        size += len(images[-1]["bytes"])
        if size >= BATCH_BYTES:
            yield batch()
            images, labels, size = [], [], 0
    if images:
        yield batch()


def parts_of_metadata(
    files: Mapping[str, Path],
    images: Mapping[str, Sequence[str]],
    metadata: Mapping[str, Sequence[str]],
    what: str,
) -> Parts:
    """The splits that metadata files describe.

    Args:
        images: split -> its images.
        metadata: split -> its metadata files.

    Raises:
        UsageError: metadata files without `file_name`, of several formats, that name missing
            images, or that a split with images lacks.
    """
    every = [path for paths in metadata.values() for path in paths]
    kinds = sorted({path.rpartition(".")[2] for path in every})
    if len(kinds) > 1:
        raise UsageError(
            f"{what}: `imagefolder`: there are both metadata.{kinds[0]} and metadata.{kinds[1]}.",
            "Keep one kind.",
        )
    for split, paths in images.items():
        if paths and not metadata[split]:
            raise UsageError(
                f"{what}: `imagefolder`: the split `{split}` has images and no "
                f"metadata.{kinds[0]}; other splits have one.",
                "Give every split its own, beside its images.",
            )
    schema = readers.common_schema(kinds[0], [(path, files[path]) for path in every], what)
    named = _named_columns(schema, f"{what}: {every[0]}")
    fields = [_field(field, named) for field in schema]
    features = {name: _feature(field) for field in schema if (name := named.get(field.name))}
    target = with_features(pa.schema(fields), features)
    return {
        split: (
            target,
            _metadata_rows(paths, kinds[0], schema, target, named, files, what),
            [*paths, *images[split]],
        )
        for split, paths in metadata.items()
        if paths
    }


def _named_columns(schema: pa.Schema, where: str) -> dict[str, str]:
    """Column with the paths of images -> column of the images.

    Raises:
        UsageError: there is none, or two columns would have one name.
    """
    named = {}
    for field in schema:
        for ending, alone, fits in (
            ("file_name", "image", is_text),
            ("file_names", "images", _is_list_of_text),
        ):
            if fits(field.type) and (field.name == ending or field.name.endswith(f"_{ending}")):
                named[field.name] = field.name.removesuffix(ending).removesuffix("_") or alone
    if not named:
        raise UsageError(
            f"{where}: no column `file_name`, so it names no image.",
            "Name the column with the images' paths `file_name`; or omit the file.",
        )
    columns = [named.get(name, name) for name in schema.names]
    if twice := sorted({column for column in columns if columns.count(column) > 1}):
        raise UsageError(
            f"{where}: there would be two columns `{twice[0]}`.",
            "Rename the one without images.",
        )
    return named


def _is_list_of_text(type_: pa.DataType) -> bool:
    return isinstance(type_, pa.ListType | pa.LargeListType) and is_text(type_.value_type)


def _field(field: pa.Field, named: Mapping[str, str]) -> pa.Field:
    if field.name not in named:
        return field
    return pa.field(named[field.name], IMAGE if is_text(field.type) else pa.list_(IMAGE))


def _feature(field: pa.Field) -> Mapping[str, Any]:
    return _FEATURE if is_text(field.type) else {"feature": _FEATURE, "_type": "List"}


def _metadata_rows(
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
                    values.append(
                        _with_bytes(value, folder, files, f"{what}: {path}: row {row + 1}")
                    )
                    size += _size(values[-1])
                if size >= BATCH_BYTES or row + 1 == batch.num_rows:
                    yield _batch(batch.slice(start, row + 1 - start), images, target)
                    start, size = row + 1, 0
                    images = {column: [] for column in named}


def _batch(
    rows: pa.RecordBatch, images: Mapping[str, list[Any]], target: pa.Schema
) -> pa.RecordBatch:
    columns = [
        pa.array(images[name], field.type) if name in images else rows.column(name)
        for name, field in zip(rows.schema.names, target, strict=True)
    ]
    return pa.record_batch(columns, schema=target)


def _with_bytes(value: Any, folder: str, files: Mapping[str, Path], where: str) -> Any:
    """The image, or list of images, that a cell names; None for null.

    Raises:
        UsageError: an image that is missing, or not below the metadata file.
    """
    if value is None:
        return None
    if isinstance(value, list):
        return [_with_bytes(item, folder, files, where) for item in value]
    path = posixpath.normpath(posixpath.join(folder, value.replace("\\", "/")))
    if (
        not value
        or path not in files
        or posixpath.isabs(value)
        or not f"{path}/".startswith(f"{folder}/".lstrip("/"))
    ):
        raise UsageError(
            f"{where}: it names the image {value!r}, which is not below the metadata file.",
            "Paths are relative to the folder of the metadata file.",
        )
    return read_image(path, files[path], where)


def _size(value: Any) -> int:
    if isinstance(value, list):
        return sum(map(_size, value))
    return len(value["bytes"]) if value else 0
