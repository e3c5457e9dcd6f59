"""Converts CIFAR-10 and CIFAR-100 to `image` and label columns.

It reads the python version (www.cs.toronto.edu/~kriz/cifar.html). Each file is a pickled dict:
`data` is N rows of 3072 bytes, the red, green and blue planes of 32 x 32 pixels. Images are stored
as PNG without compression (parquet compresses), so the bytes depend on no image library.

An unpickler calls every function that a pickle names. `read_pickle` accepts only the names of
numpy's array and dtype, and builds its own records for them, so the file's content never reaches
numpy. Every other name is refused.
"""

from __future__ import annotations

import io
import pickle
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa

from stage.convert.images import IMAGE, image_schema
from stage.errors import DamageError, PolicyError, UsageError, about
from stage.files import human_size

MAX_SIZE = 1 << 30  # bytes


class Array:
    """A numpy array of bytes as a pickle describes it."""

    def __init__(self, *_: object) -> None:
        self.shape: tuple[int, ...] = ()
        self.is_fortran = False
        self.data = b""

    def __setstate__(self, state: object) -> None:
        """numpy's `ndarray.__reduce__`: (version, shape, dtype, is_fortran, bytes)."""
        match state:
            case (
                int(),
                (int() as rows, int() as columns),
                DType(),
                is_fortran,
                bytes() | str() as data,
            ):
                raw = data.encode("latin1") if isinstance(data, str) else data
            case _:
                raise pickle.UnpicklingError("an array that is not of rows of bytes")
        if min(rows, columns) < 0 or rows * columns != len(raw):
            raise pickle.UnpicklingError(f"an array of {rows} x {columns} with {len(raw)} bytes")
        self.shape, self.is_fortran, self.data = (rows, columns), bool(is_fortran), raw

    def as_rows(self) -> bytes:
        """Its bytes row by row."""
        rows = self.shape[0]
        if self.is_fortran:
            return b"".join(self.data[row::rows] for row in range(rows))
        return self.data


class DType:
    """numpy's dtype of bytes."""

    def __init__(self, code: object = "", *_: object) -> None:
        if code not in ("u1", b"u1", "|u1", b"|u1"):
            raise pickle.UnpicklingError(f"an array of {code!r}, not of bytes")

    def __setstate__(self, state: object) -> None:
        """numpy's `dtype.__reduce__`: ignored; bytes have no byte order."""


def _encode(text: object, encoding: object = "latin1") -> bytes:
    """`_codecs.encode`: Python 3 writes bytes so in old protocols."""
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1", b"latin1"):
        raise pickle.UnpicklingError("bytes in an encoding other than latin1")
    return text.encode("latin1")


_BUILDERS: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): Array,
    ("numpy", "dtype"): DType,
    ("numpy.core.multiarray", "_reconstruct"): Array,
    ("numpy._core.multiarray", "_reconstruct"): Array,
    ("_codecs", "encode"): _encode,
}
_BROKEN = (
    pickle.UnpicklingError,
    struct.error,
    EOFError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    AssertionError,
    OverflowError,
    MemoryError,
    RecursionError,
)


class _NotPlainData(Exception):
    """A pickle names something that is not plain data."""


# The unpickler written in Python: the one in C allocates as much memory for its memo as a pickle
# demands.
class _PlainData(pickle._Unpickler):
    left = MAX_SIZE  # bytes that may still be made from text, so that no text is used repeatedly

    def find_class(self, module: str, name: str) -> Any:
        try:
            builder = _BUILDERS[module, name]
        except KeyError:
            raise _NotPlainData(f"{module}.{name}") from None
        return self._encode if builder is _encode else builder

    def _encode(self, text: object, *encoding: object) -> bytes:
        data = _encode(text, *encoding)
        self._take(len(data))
        return data

    def _take(self, size: int) -> None:
        self.left -= size
        if self.left < 0:
            raise _NotPlainData("more bytes than it has")

    def load_build(self) -> None:
        """Accepts state for arrays and dtypes only: on other objects it would set attributes."""
        if not isinstance(self.stack[-2], Array | DType):  # type: ignore[attr-defined]
            raise _NotPlainData(f"the state of a {type(self.stack[-2]).__name__}")  # type: ignore[attr-defined]
        state = self.stack[-1]  # type: ignore[attr-defined]
        self._take(
            sum(len(part) for part in state if isinstance(part, str))
            if isinstance(state, tuple)
            else 0
        )
        super().load_build()  # type: ignore[misc]

    def load_bytearray8(self) -> None:
        """Refused: it allocates as much memory as the pickle demands, and CIFAR needs none."""
        raise _NotPlainData("a bytearray")

    dispatch: ClassVar[dict[int, Any]] = {
        **pickle._Unpickler.dispatch,
        pickle.BUILD[0]: load_build,
        pickle.BYTEARRAY8[0]: load_bytearray8,
    }

    def persistent_load(self, pid: object) -> Any:
        raise _NotPlainData("a persistent id")

    def get_extension(self, code: int) -> None:
        raise _NotPlainData(f"the extension {code}")


def read_pickle(path: Path) -> Any:
    """Plain data from a pickle; strings of Python 2 are returned as bytes.

    Raises:
        PolicyError: it names more than numpy arrays, or is larger than 1 GiB.
        DamageError: it is not a pickle.
    """
    if (size := path.stat().st_size) > MAX_SIZE:
        raise PolicyError(
            f"a pickle of {human_size(size)}; the limit is {human_size(MAX_SIZE)}.",
            "Check the address: the files of CIFAR are smaller.",
        )
    stream = io.BytesIO(path.read_bytes())
    try:
        unpickler = _PlainData(stream, encoding="bytes")
        unpickler.left = size
        return unpickler.load()
    except _NotPlainData as error:
        raise PolicyError(
            f"the pickle wants to build {error}, which plain data does not need; "
            "nothing in it was run.",
            "Do not load this file anywhere. Check its address and sha256.",
        ) from None
    except _BROKEN as error:
        raise DamageError(
            f"not a pickle of plain data: {error or type(error).__name__}.",
            "Check its address and sha256.",
        ) from None


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
