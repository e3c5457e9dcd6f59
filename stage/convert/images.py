"""Converts images to splits with an `image` column: folders, as `datasets` reads them, and CIFAR.

With metadata files (`metadata.csv`, `.jsonl` or `.parquet`) beside the images, their rows are the
rows, as in `datasets`' folder_based_builder: `file_name` becomes `image`. Paths are relative to the
metadata file and stay below it. Images that no row names are not in the dataset.

Without them the folders are the labels, if there are several and all images are equally deep; else
`image` is the only column. The metadata of the schema makes `datasets` decode the images; their
bytes do not change.

Of CIFAR-10 and CIFAR-100 the python version is read (www.cs.toronto.edu/~kriz/cifar.html). Each
file is a pickled dict: `data` is N rows of 3072 bytes, the red, green and blue planes of 32 x 32
pixels. Images are stored as PNG without compression (parquet compresses), so the bytes depend on no
image library.

An unpickler calls every function that a pickle names. `read_pickle` accepts only the names of
numpy's array and dtype, and builds its own records for them, so the file's content never reaches
numpy. Every other name is refused.
"""

from __future__ import annotations

import io
import json
import pickle
import posixpath
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa

from stage.convert.formats import METADATA_FILES, is_image
from stage.convert.readers import HUGGINGFACE, Table
from stage.errors import DamageError, PolicyError, UsageError, about
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


def cifar_parts(files: Mapping[str, Path]) -> Parts:
    """The splits `train` and `test` of CIFAR.

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
