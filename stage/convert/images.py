"""Converts a folder of images to splits with an `image` column, as `datasets`' imagefolder does.

With metadata files (`metadata.csv`, `.jsonl` or `.parquet`) beside the images, their rows are the
rows, as in `datasets`' folder_based_builder: `file_name` becomes `image`. Paths are relative to the
metadata file and stay below it. Images that no row names are not in the dataset.

Without them the folders are the labels, if there are several and all images are equally deep; else
`image` is the only column. The metadata of the schema makes `datasets` decode the images; their
bytes do not change.
"""

from __future__ import annotations

import json
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from stage.convert.formats import METADATA_FILES, is_image
from stage.convert.readers import HUGGINGFACE, Table
from stage.errors import UsageError, about
from stage.files import human_size

MAX_IMAGE = 256 * 2**20  # bytes
_BATCH_BYTES = 16 * 2**20
IMAGE = pa.struct([pa.field("bytes", pa.binary()), pa.field("path", pa.string())])
_COMMON = (".png", ".jpg", ".jpeg", ".gif", ".webp", ".bmp", ".tif", ".tiff")
_BEGINNINGS = (b"\x89PNG", b"\xff\xd8", b"GIF8", b"RIFF", b"BM", b"II", b"MM", b"P", b"\0\0")
"""The first bytes of any file that is an image, whatever its name in `_COMMON`: an empty file or
a page of a server is no image. Only the ranks' Pillow can say whether the rest of it is whole."""
_ENDS = {b"\x89PNG": b"IEND", b"\xff\xd8": b"\xff\xd9"}
"""Beginning -> what is at the end of a whole file, or, of photos with a video behind, before it."""
_NAME = "file_name"  # the column of metadata that names an image

# split -> its schema, its rows, the paths that they are made from
Parts = dict[str, tuple[pa.Schema, Iterator[pa.RecordBatch], list[str]]]


def image_schema(columns: Sequence[pa.Field], labels: Mapping[str, Sequence[str]]) -> pa.Schema:
    """A schema with the column `image`, and with the meaning of columns for `datasets`.

    Args:
        columns: `image` among them.
        labels: label column -> the names of its classes.
    """
    features: dict[str, Any] = {"image": {"_type": "Image"}}
    for column, names in labels.items():
        features[column] = {"names": list(names), "_type": "ClassLabel"}
    return pa.schema(columns, {HUGGINGFACE: json.dumps({"info": {"features": features}})})


def parts(files: Mapping[str, Path], splits: Mapping[str, Sequence[str]], scratch: Path) -> Parts:
    """The splits of a folder of images.

    Args:
        files: relative POSIX path -> the file.
        splits: split -> paths of its images and metadata files.
        scratch: a folder for temporary files.

    Raises:
        UsageError: no images, or metadata that does not fit them.
    """
    images = {split: [path for path in paths if is_image(path)] for split, paths in splits.items()}
    every = [path for paths in images.values() for path in paths]
    if not every:
        raise UsageError(
            "`imagefolder`: no image in it.",
            "Images end in .png, .jpg, .webp and the like.",
        )
    metadata = {
        split: [path for path in paths if path.rpartition("/")[2] in METADATA_FILES]
        for split, paths in splits.items()
    }
    if any(metadata.values()):
        return _parts_of_metadata(files, images, metadata, scratch)
    folders = sorted({posixpath.basename(posixpath.dirname(path)) for path in every})
    has_labels = len(folders) > 1 and len({path.count("/") for path in every}) == 1
    labels = {"label": folders} if has_labels else {}
    columns = [pa.field("image", IMAGE), *(pa.field(name, pa.int64()) for name in labels)]
    schema = image_schema(columns, labels)
    return {
        split: (schema, _rows_of_images(schema, folders, paths, files), paths)
        for split, paths in images.items()
        if paths
    }


def _rows_of_images(
    schema: pa.Schema,
    folders: Sequence[str],
    paths: Sequence[str],
    files: Mapping[str, Path],
) -> Iterator[pa.RecordBatch]:
    rows: list[dict[str, Any]] = []
    size = 0
    for path in paths:
        image = _read(path, files[path])
        label = folders.index(posixpath.basename(posixpath.dirname(path)))
        rows.append({"image": image, "label": label})
        size += len(image["bytes"])
        if size >= _BATCH_BYTES:
            yield pa.RecordBatch.from_pylist(rows, schema=schema)
            rows, size = [], 0
    yield pa.RecordBatch.from_pylist(rows, schema=schema)


def _read(path: str, file: Path) -> dict[str, Any]:
    """A value of an image column.

    Raises:
        UsageError: it is larger than 256 MiB, or empty, or a page or text instead of an image, or
            its end is missing.
    """
    size = file.stat().st_size
    if size > MAX_IMAGE:
        raise UsageError(
            f"{path} has {human_size(size)}; an image may have {human_size(MAX_IMAGE)}.",
            "Make the image smaller, or remove it from the folder.",
        )
    data, fault = file.read_bytes(), ""
    if path.lower().endswith(_COMMON) and not data.startswith(_BEGINNINGS):
        begins = f"it begins with {data[:12]!r}" if data else "it is empty"
        fault = f"is no image: {begins}"
    elif any(data.startswith(start) and data.rfind(end) < 0 for start, end in _ENDS.items()):
        fault = "is not whole: its end is missing, as after a copy that broke off"
    if fault:
        raise UsageError(
            f"{path} {fault}.",
            "Copy it again from where it came, or omit it (and its row of metadata) by "
            f"exclude: [{json.dumps(path)}]. "
            "(A dataset of the Hub with `include` travels as published.)",
        )
    return {"bytes": data, "path": posixpath.basename(path)}


def _parts_of_metadata(
    files: Mapping[str, Path],
    images: Mapping[str, Sequence[str]],
    metadata: Mapping[str, list[str]],
    scratch: Path,
) -> Parts:
    """The splits that metadata files describe.

    Raises:
        UsageError: metadata files without `file_name`, of several formats, that name missing
            images, or that a split with images lacks.
    """
    every = [path for paths in metadata.values() for path in paths]
    kinds = sorted({path.rpartition(".")[2] for path in every})
    if len(kinds) > 1:
        raise UsageError(
            f"`imagefolder`: there are both metadata.{kinds[0]} and metadata.{kinds[1]}.",
            "Keep one kind.",
        )
    for split, paths in images.items():
        if paths and not metadata[split]:
            raise UsageError(
                f"`imagefolder`: the split `{split}` has images and no "
                f"metadata.{kinds[0]}; other splits have one.",
                "Give every split its own, beside its images.",
            )
    table = Table(kinds[0], [(path, files[path]) for path in every], scratch, ",")
    with about(every[0]):
        _check_columns(table.schema)
    columns = [pa.field("image", IMAGE) if field.name == _NAME else field for field in table.schema]
    schema = image_schema(columns, {})
    return {
        split: (
            schema,
            _rows_of_metadata(table, schema, paths, files),
            [*paths, *images[split]],
        )
        for split, paths in metadata.items()
        if paths
    }


def _check_columns(schema: pa.Schema) -> None:
    others = [name for name in schema.names if name.endswith(("_file_name", "file_names"))]
    if _NAME not in schema.names or others or "string" not in str(schema.field(_NAME).type):
        raise UsageError(
            "it has no column `file_name` of texts"
            + (f", or names more images a row, in `{others[0]}`." if others else ".")
            + f" Its header: {', '.join(schema.names)[:60]}",
            "Name the column with the images' paths `file_name`, one image a row, with commas "
            "between the columns of a CSV; or omit the file.",
        )
    if "image" in schema.names:
        raise UsageError("there would be two columns `image`.", "Rename the one without images.")


def _rows_of_metadata(
    table: Table,
    schema: pa.Schema,
    paths: Sequence[str],
    files: Mapping[str, Path],
) -> Iterator[pa.RecordBatch]:
    for path in paths:
        number, base = 0, posixpath.dirname(path)
        for batch in table.rows([(path, files[path])]):
            start, size, images = 0, 0, list[Any]()
            for index, name in enumerate(batch.column(_NAME).to_pylist()):
                number += 1
                with about(f"{path}: row {number}"):
                    images.append(_named(name, base, files))
                size += len(images[-1]["bytes"]) if images[-1] else 0
                if size >= _BATCH_BYTES or index + 1 == batch.num_rows:
                    rows = batch.slice(start, len(images))
                    pictures = pa.array(images, IMAGE)
                    columns = [
                        pictures if field.name == "image" else rows.column(field.name)
                        for field in schema
                    ]
                    yield pa.record_batch(columns, schema=schema)
                    start, size, images = index + 1, 0, []


def _named(name: str | None, base: str, files: Mapping[str, Path]) -> Any:
    """The image that a cell names; None for null.

    Raises:
        UsageError: an image that is missing, or not below the folder of the metadata file.
    """
    if name is None:
        return None
    path = posixpath.normpath(posixpath.join(base, name.replace("\\", "/")))
    if not name or path not in files or not f"{path}/".startswith(f"{base}/".lstrip("/")):
        raise UsageError(
            f"it names the image {name!r}, which is not below the metadata file.",
            "Paths are relative to the folder of the metadata file.",
        )
    return _read(path, files[path])
