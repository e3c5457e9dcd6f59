"""Reads a pickle that holds plain data, and can build nothing else.

An unpickler calls whatever a pickle names. This one knows no name but numpy's array and dtype, and for these it builds
records of its own, so not even numpy runs on what the file says. Everything else a pickle can name is refused.
"""

from __future__ import annotations

import io
import pickle
import re
import struct
from pathlib import Path
from typing import Any, ClassVar

from stage.disk import human_size
from stage.errors import DamageError, PolicyError

MAX_SIZE = 1 << 30  # bytes


class Array:
    """A numpy array as a pickle describes it: shape, dtype (`u1`, `<i8`) and the raw bytes."""

    def __init__(self) -> None:
        self.shape: tuple[int, ...] = ()
        self.dtype = ""
        self.is_fortran = False
        self.data = b""

    def __setstate__(self, state: object) -> None:
        """numpy's `ndarray.__reduce__`: (version, shape, dtype, is_fortran, bytes)."""
        match state:
            case (int(), tuple() as shape, DType() as dtype, bool() | int() as fortran, bytes() | str() as data):
                pass
            case _:
                raise pickle.UnpicklingError("an array whose state is not numpy's")
        raw = data.encode("latin1") if isinstance(data, str) else data
        count = 1
        for length in shape:
            if not isinstance(length, int) or length < 0:
                raise pickle.UnpicklingError("an array with a shape that is none")
            count *= length
        if count * dtype.size != len(raw):
            raise pickle.UnpicklingError(f"an array of {count} numbers with {len(raw)} bytes")
        self.shape, self.dtype, self.is_fortran, self.data = shape, dtype.name, bool(fortran), raw

    def as_rows(self) -> bytes:
        """The bytes of a two-dimensional array of bytes, row by row."""
        if not self.is_fortran:
            return self.data
        rows = self.shape[0]
        return b"".join(self.data[row::rows] for row in range(rows))


class DType:
    """A numpy dtype of plain numbers: `u1`, `i8`, `f4`, `b1`."""

    def __init__(self, code: object = "", *_: object) -> None:
        text = code.decode("latin1") if isinstance(code, bytes) else code
        match = re.fullmatch(r"[<>|=]?([buif])([1248])", text) if isinstance(text, str) else None
        if match is None:
            raise pickle.UnpicklingError(f"an array of {text!r}, not of numbers")
        self.name, self.size = match[1] + match[2], int(match[2])

    def __setstate__(self, state: object) -> None:
        """numpy's `dtype.__reduce__`: only the byte order (second) says something of plain numbers."""


def _reconstruct(*_: object) -> Array:
    return Array()


def _encode(text: object, encoding: object = "latin1") -> bytes:
    """`_codecs.encode`, by which Python 3 writes bytes in old protocols."""
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1", b"latin1"):
        raise pickle.UnpicklingError("bytes in an encoding that bytes are not written in")
    return text.encode("latin1")


_BUILDERS: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): Array,
    ("numpy", "dtype"): DType,
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
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
)


class _Refused(Exception):
    """A pickle names something that is not plain data."""


# The unpickler written in Python: that in C takes a pickle's word for how much memory its memo needs.
class _PlainData(pickle._Unpickler):
    left = MAX_SIZE  # bytes that may be made of text: as many as the pickle has, else it makes them again and again

    def find_class(self, module: str, name: str) -> Any:
        try:
            builder = _BUILDERS[module, name]
        except KeyError:
            raise _Refused(f"{module}.{name}") from None
        return self._encode if builder is _encode else builder

    def _encode(self, text: object, *encoding: object) -> bytes:
        data = _encode(text, *encoding)
        self._take(len(data))
        return data

    def _take(self, size: int) -> None:
        self.left -= size
        if self.left < 0:
            raise _Refused("more bytes than it has")

    def load_build(self) -> None:
        """State is for arrays and their types alone: on anything else it would set attributes."""
        if not isinstance(self.stack[-2], Array | DType):  # type: ignore[attr-defined]
            raise _Refused(f"the state of a {type(self.stack[-2]).__name__}")  # type: ignore[attr-defined]
        state = self.stack[-1]  # type: ignore[attr-defined]
        self._take(sum(len(part) for part in state if isinstance(part, str)) if isinstance(state, tuple) else 0)
        super().load_build()  # type: ignore[misc]

    def load_bytearray8(self) -> None:
        """It takes the pickle's word for how much memory it needs; arrays and labels need none of its kind."""
        raise _Refused("a bytearray")

    dispatch: ClassVar[dict[int, Any]] = {
        **pickle._Unpickler.dispatch,
        pickle.BUILD[0]: load_build,
        pickle.BYTEARRAY8[0]: load_bytearray8,
    }

    def persistent_load(self, pid: object) -> Any:
        raise _Refused("a persistent id")

    def get_extension(self, code: int) -> None:
        raise _Refused(f"the extension {code}")


def read_pickle(path: Path, where: str) -> Any:
    """Plain data from a pickle; text of Python 2 comes as bytes.

    Args:
        where: for messages.

    Raises:
        PolicyError: it names anything but numpy arrays, or is larger than 1 GiB.
        DamageError: it is no pickle.
    """
    if (size := path.stat().st_size) > MAX_SIZE:
        raise PolicyError(f"{where}: a pickle of {human_size(size)}; the limit is {human_size(MAX_SIZE)}.")
    stream = io.BytesIO(path.read_bytes())
    try:
        unpickler = _PlainData(stream, encoding="bytes")
        unpickler.left = size
        return unpickler.load()
    except _Refused as error:
        raise PolicyError(
            f"{where}: the pickle wants to build {error}, which plain data does not need; nothing of it was run.",
            "Do not load this file anywhere. Check its address and sha256.",
        ) from None
    except _BROKEN as error:
        raise DamageError(f"{where}: not a pickle of plain data: {error}.", "Check its address and sha256.") from None
    except (MemoryError, RecursionError) as error:
        raise DamageError(
            f"{where}: a pickle that does not end: {type(error).__name__}.", "Check its sha256."
        ) from None
