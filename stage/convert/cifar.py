"""Converts CIFAR-10 and CIFAR-100 to `image` and label columns.

It reads the python version (www.cs.toronto.edu/~kriz/cifar.html). Each file is a pickled dict:
`data` is N rows of 3072 bytes, the red, green and blue planes of 32 x 32 pixels. Images are stored
as PNG without compression (parquet compresses), so the bytes depend on no image library.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from stage.convert.images import IMAGE, image_schema
from stage.convert.plain_pickle import Array, read_pickle
from stage.errors import DamageError, UsageError, about

SIDE = 32
ROW = 3 * SIDE * SIDE
BATCH = 1000
# label column -> its key in a batch, the key of its names in the meta file
_TEN = {"label": (b"labels", b"label_names")}
_HUNDRED = {
    "fine_label": (b"fine_labels", b"fine_label_names"),
    "coarse_label": (b"coarse_labels", b"coarse_label_names"),
}


def splits(
    files: Mapping[str, Path],
) -> dict[str, tuple[pa.Schema, Iterator[pa.RecordBatch], list[str]]]:
    """The splits `train` and `test`.

    CIFAR-10 is `data_batch_1..5`, `test_batch`, `batches.meta`; CIFAR-100 `train`, `test`, `meta`.

    Args:
        files: relative POSIX path -> the file.

    Returns:
        Split -> its schema, its rows, and the paths that they are read from.

    Raises:
        UsageError: one of these files is missing.
        PolicyError: a pickle that would build more than plain data.
        DamageError: a file with other content.
    """
    by_name = {path.rpartition("/")[2]: path for path in sorted(files)}
    if "batches.meta" in by_name:
        columns, meta = _TEN, "batches.meta"
        wanted = {"train": [f"data_batch_{n}" for n in range(1, 6)], "test": ["test_batch"]}
    else:
        columns, meta, wanted = _HUNDRED, "meta", {"train": ["train"], "test": ["test"]}
    missing = [name for name in (meta, *wanted["train"], *wanted["test"]) if name not in by_name]
    if missing:
        raise UsageError(
            f"`convert: cifar`: {missing[0]} is not among the files.",
            "It reads the python version: cifar-10-python.tar.gz or cifar-100-python.tar.gz, "
            "with `unpack: true`.",
        )
    with about(meta):
        names = _names(files[by_name[meta]], columns)
    columns_ = [pa.field("image", IMAGE), *(pa.field(name, pa.int64()) for name in names)]
    schema = image_schema(columns_, names)
    paths = {split: [by_name[name] for name in parts] for split, parts in wanted.items()}
    return {
        split: (schema, _rows(schema, columns, names, paths[split], files), paths[split])
        for split in wanted
    }


def _names(path: Path, columns: Mapping[str, tuple[bytes, bytes]]) -> dict[str, list[str]]:
    meta = read_pickle(path)
    result = {}
    for column, (_, key) in columns.items():
        names = meta.get(key) if isinstance(meta, dict) else None
        if not isinstance(names, list) or not all(isinstance(name, bytes | str) for name in names):
            raise _odd(f"no list of names under {key.decode()}")
        result[column] = [
            n.decode("utf-8", "replace") if isinstance(n, bytes) else n for n in names
        ]
    return result


def _rows(
    schema: pa.Schema,
    columns: Mapping[str, tuple[bytes, bytes]],
    names: Mapping[str, Sequence[str]],
    paths: Sequence[str],
    files: Mapping[str, Path],
) -> Iterator[pa.RecordBatch]:
    for path in paths:
        with about(path):
            batch = read_pickle(files[path])
            data = batch.get(b"data") if isinstance(batch, dict) else None
            if not isinstance(data, Array) or data.shape[1:] != (ROW,):
                raise _odd(f"`data` is not an array of rows of {ROW} bytes")
            pixels, count = data.as_rows(), data.shape[0]
            labels = [
                _labels(batch, key, count, len(names[column]))
                for column, (key, _) in columns.items()
            ]
        ids = batch.get(b"filenames")
        for start in range(0, count, BATCH):
            end = min(count, start + BATCH)
            images = [
                {"bytes": png(pixels[i * ROW : (i + 1) * ROW]), "path": _file_name(ids, i)}
                for i in range(start, end)
            ]
            numbers = [pa.array(column[start:end], pa.int64()) for column in labels]
            yield pa.record_batch([pa.array(images, IMAGE), *numbers], schema=schema)


def _labels(batch: Mapping[bytes, Any], key: bytes, count: int, classes: int) -> list[int]:
    labels = batch.get(key)
    if not isinstance(labels, list) or len(labels) != count:
        raise _odd(f"`{key.decode()}` is not a list of {count} labels")
    if not all(type(label) is int and 0 <= label < classes for label in labels):
        raise _odd(f"`{key.decode()}` has values that are not labels from 0 to {classes - 1}")
    return labels


def _file_name(ids: Any, index: int) -> str | None:
    name = ids[index] if isinstance(ids, list) and index < len(ids) else None
    if isinstance(name, bytes):
        return name.decode("utf-8", "replace")
    return name if isinstance(name, str) else None


def _odd(problem: str) -> DamageError:
    return DamageError(
        f"not a file of CIFAR's python version: {problem}.",
        "Check the address and sha256.",
    )


def png(planes: bytes) -> bytes:
    """A PNG (RFC 2083) of 32 x 32 pixels, with stored deflate blocks (RFC 1951).

    It is written without zlib's compressor, whose output differs between versions.

    Args:
        planes: 3072 bytes: the red, green and blue planes.
    """
    size = SIDE * SIDE
    pixels = bytearray(ROW)
    for channel in range(3):
        pixels[channel::3] = planes[channel * size : (channel + 1) * size]
    lines = b"".join(b"\0" + bytes(pixels[y * SIDE * 3 : (y + 1) * SIDE * 3]) for y in range(SIDE))
    stored = b"\x78\x01\x01" + struct.pack("<HH", len(lines), len(lines) ^ 0xFFFF) + lines
    stored += struct.pack(">I", zlib.adler32(lines))
    header = struct.pack(">IIBBBBB", SIDE, SIDE, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + _chunk(b"IHDR", header)
        + _chunk(b"IDAT", stored)
        + _chunk(b"IEND", b"")
    )


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
