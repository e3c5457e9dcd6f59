"""A folder of images, `<label>/x.png` or `<split>/<label>/x.png`, as a split with `image` and `label`.

The columns are those of `datasets`' imagefolder, and so is the note in the schema that tells it to decode them. The
images themselves stay the bytes they were.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pyarrow as pa

from stage.disk import human_size
from stage.errors import UsageError

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".pgm")
MAX_IMAGE = 256 * 2**20  # bytes
BATCH_BYTES = 16 * 2**20
IMAGE = pa.struct([pa.field("bytes", pa.binary()), pa.field("path", pa.string())])


def image_schema(labels: Mapping[str, Sequence[str]]) -> pa.Schema:
    """`image` and label columns, with the note by which `datasets` knows them (its `Features` as JSON).

    Args:
        labels: label column -> the names of its classes.
    """
    classes = {column: {"names": list(names), "_type": "ClassLabel"} for column, names in labels.items()}
    note = {"info": {"features": {"image": {"_type": "Image"}, **classes}}}
    columns = [pa.field("image", IMAGE), *(pa.field(column, pa.int64()) for column in labels)]
    return pa.schema(columns, metadata={"huggingface": json.dumps(note)})


def splits(
    files: Mapping[str, Path], splits_of: Callable[[Sequence[str]], Mapping[str, list[str]]], what: str
) -> dict[str, tuple[pa.Schema, Iterator[pa.RecordBatch], list[str]]]:
    """Split -> its schema, its rows, and the paths they are made of. Labels are the names of the folders, sorted.

    Raises:
        UsageError: no images; images beside and below folders of labels; a metadata file, which is not read.
    """
    shown = [p for p in sorted(files) if not any(part.startswith((".", "__")) for part in p.split("/"))]
    for path in shown:
        if path.rpartition("/")[2] in ("metadata.csv", "metadata.jsonl", "metadata.parquet"):
            raise UsageError(
                f"{what}: `convert: imagefolder` does not read {path}, and its columns would be lost.",
                "Make a parquet file with `datasets` (load_dataset('imagefolder', ...).to_parquet) and name that.",
            )
    images = [path for path in shown if path.lower().endswith(SUFFIXES)]
    if not images:
        raise UsageError(f"{what}: `convert: imagefolder`: no image in it.", f"Images end in {', '.join(SUFFIXES)}.")
    parts = {split: paths for split, paths in splits_of(images).items() if paths}
    found = {_label(path) for paths in parts.values() for path in paths}
    labels = sorted(label for label in found if label is not None)
    if None in found:
        raise UsageError(
            f"{what}: `convert: imagefolder`: images lie outside of any folder that could be their label.",
            "Put them as <split>/<label>/x.png or <label>/x.png.",
        )
    schema = image_schema({"label": labels})
    return {split: (schema, _rows(schema, labels, paths, files, what), paths) for split, paths in parts.items()}


def _label(path: str) -> str | None:
    parts = path.split("/")
    return parts[-2] if len(parts) > 1 else None


def _rows(
    schema: pa.Schema, labels: Sequence[str], paths: Sequence[str], files: Mapping[str, Path], what: str
) -> Iterator[pa.RecordBatch]:
    numbers = {label: number for number, label in enumerate(labels)}
    images: list[dict[str, bytes | str]] = []
    classes: list[int] = []
    size = 0
    for path in paths:
        length = files[path].stat().st_size
        if length > MAX_IMAGE:
            raise UsageError(f"{what}: {path} has {human_size(length)}; an image may have {human_size(MAX_IMAGE)}.")
        images.append({"bytes": files[path].read_bytes(), "path": path.rpartition("/")[2]})
        classes.append(numbers[_label(path) or ""])
        size += length
        if size >= BATCH_BYTES:
            yield pa.record_batch([pa.array(images, IMAGE), pa.array(classes, pa.int64())], schema=schema)
            images, classes, size = [], [], 0
    if images:
        yield pa.record_batch([pa.array(images, IMAGE), pa.array(classes, pa.int64())], schema=schema)
