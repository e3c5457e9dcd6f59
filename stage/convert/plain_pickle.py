"""Reads pickles of plain data; it can build nothing else.

An unpickler calls every function that a pickle names. This one accepts only the names of numpy's
array and dtype, and builds its own records for them, so the file's content never reaches numpy.
Every other name is refused.
"""

from __future__ import annotations

import io
import pickle
import struct
from pathlib import Path
from typing import Any, ClassVar

from stage.errors import DamageError, PolicyError
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
