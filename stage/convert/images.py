"""A folder of images as splits with an `image` column, and what is told of each: `datasets`' imagefolder.

Where metadata files lie with the images (`stage.convert.metadata`), their rows are the rows. Else the folders are the
labels, if there is more than one and all images lie equally deep; else there is `image` alone. The note in the schema
tells `datasets` to decode them; the images themselves stay the bytes they were.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from stage.convert.kinds import METADATA_FILES, is_image
from stage.disk import human_size
from stage.errors import UsageError

MAX_IMAGE = 256 * 2**20  # bytes
BATCH_BYTES = 16 * 2**20
IMAGE = pa.struct([pa.field("bytes", pa.binary()), pa.field("path", pa.string())])

# split -> its schema, its rows, the paths they are made of
Parts = dict[str, tuple[pa.Schema, Iterator[pa.RecordBatch], list[str]]]


def image_schema(labels: Mapping[str, Sequence[str]]) -> pa.Schema:
    """`image` and label columns, with the note by which `datasets` knows them.

    Args:
        labels: label column -> the names of its classes.
    """
    classes = {column: {"names": list(names), "_type": "ClassLabel"} for column, names in labels.items()}
    columns = [pa.field("image", IMAGE), *(pa.field(column, pa.int64()) for column in labels)]
    return with_features(pa.schema(columns), {"image": {"_type": "Image"}, **classes})


def with_features(schema: pa.Schema, features: Mapping[str, Any]) -> pa.Schema:
    """A schema with a note of what its columns mean to `datasets` (its `Features` as JSON)."""
    return schema.with_metadata({"huggingface": json.dumps({"info": {"features": features}})})


def read_image(path: str, file: Path, what: str) -> dict[str, bytes | str]:
    """A value of an image column.

    Raises:
        UsageError: it is too large to be one.
    """
    size = file.stat().st_size
    if size > MAX_IMAGE:
        raise UsageError(f"{what}: {path} has {human_size(size)}; an image may have {human_size(MAX_IMAGE)}.")
    return {"bytes": file.read_bytes(), "path": path.rpartition("/")[2]}


def parts(files: Mapping[str, Path], splits: Mapping[str, Sequence[str]], what: str) -> Parts:
    """The splits of a folder of images.

    Args:
        splits: split -> images and metadata files, relative POSIX paths.

    Raises:
        UsageError: no images; metadata that does not fit them.
    """
    images = {split: [path for path in paths if is_image(path)] for split, paths in splits.items()}
    if not any(images.values()):
        raise UsageError(f"{what}: `imagefolder`: no image in it.", "Images end in .png, .jpg, .webp and the like.")
    if any(_is_metadata(path) for paths in splits.values() for path in paths):
        from stage.convert import metadata

        told = {split: [path for path in paths if _is_metadata(path)] for split, paths in splits.items()}
        return metadata.parts(files, images, told, what)
    every = [path for paths in images.values() for path in paths]
    folders = sorted({_folder(path) for path in every})
    has_labels = len(folders) > 1 and len({path.count("/") for path in every}) == 1
    schema = image_schema({"label": folders} if has_labels else {})
    numbers = {folder: number for number, folder in enumerate(folders)} if has_labels else None
    return {
        split: (schema, _rows(schema, numbers, paths, files, what), paths) for split, paths in images.items() if paths
    }


def _is_metadata(path: str) -> bool:
    return path.rpartition("/")[2] in METADATA_FILES


def _folder(path: str) -> str:
    return path.rpartition("/")[0].rpartition("/")[2]


def _rows(
    schema: pa.Schema, numbers: Mapping[str, int] | None, paths: Sequence[str], files: Mapping[str, Path], what: str
) -> Iterator[pa.RecordBatch]:
    images: list[dict[str, bytes | str]] = []
    labels: list[int] = []
    size = 0

    def batch() -> pa.RecordBatch:
        columns = [pa.array(images, IMAGE), *([] if numbers is None else [pa.array(labels, pa.int64())])]
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
