"""Reads pickles of plain data; it can build nothing else.

An unpickler calls every function that a pickle names. This one accepts only the names of numpy's
array and dtype, and builds its own records for them, so the file's content never reaches numpy.
Every other name is refused.
"""

from __future__ import annotations

import io
import pickle
import re
import struct
from pathlib import Path
from typing import Any, ClassVar

from stage.errors import DamageError, PolicyError
from stage.files import human_size

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
            case (
                int(),
                tuple() as shape,
                DType() as dtype,
                bool() | int() as fortran,
                bytes() | str() as data,
            ):
                pass
            case _:
                raise pickle.UnpicklingError("an array whose state is not numpy's")
        raw = data.encode("latin1") if isinstance(data, str) else data
        count = 1
        for length in shape:
            if not isinstance(length, int) or length < 0:
                raise pickle.UnpicklingError("an array with an invalid shape")
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
    """A numpy dtype of plain numbers: `u1`, `i8`, `f4`, `b1`; `size` in bytes."""

    def __init__(self, code: object = "", *_: object) -> None:
        text = code.decode("latin1") if isinstance(code, bytes) else code
        match = re.fullmatch(r"[<>|=]?([buif])([1248])", text) if isinstance(text, str) else None
        if match is None:
            raise pickle.UnpicklingError(f"an array of {text!r}, not of numbers")
        self.name, self.size = match[1] + match[2], int(match[2])

    def __setstate__(self, state: object) -> None:
        """numpy's `dtype.__reduce__`: ignored; CIFAR's arrays are bytes, without a byte order."""


def _reconstruct(*_: object) -> Array:
    return Array()


def _encode(text: object, encoding: object = "latin1") -> bytes:
    """`_codecs.encode`: Python 3 writes bytes so in old protocols."""
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1", b"latin1"):
        raise pickle.UnpicklingError("bytes in an encoding other than latin1")
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


# The unpickler written in Python: the one in C allocates as much memory for its memo as a pickle
# demands.
class _PlainData(pickle._Unpickler):
    left = MAX_SIZE  # bytes that may still be made from text, so that no text is used repeatedly

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
        """Accepts state for arrays and dtypes only: on other objects it would set attributes."""
        if not isinstance(self.stack[-2], Array | DType):  # type: ignore[attr-defined]
            raise _Refused(f"the state of a {type(self.stack[-2]).__name__}")  # type: ignore[attr-defined]
        state = self.stack[-1]  # type: ignore[attr-defined]
        self._take(
            sum(len(part) for part in state if isinstance(part, str))
            if isinstance(state, tuple)
            else 0
        )
        super().load_build()  # type: ignore[misc]

    def load_bytearray8(self) -> None:
        """Refused: it allocates as much memory as the pickle demands, and CIFAR needs none."""
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
    """Plain data from a pickle; strings of Python 2 are returned as bytes.

    Args:
        where: names the file in messages.

    Raises:
        PolicyError: it names more than numpy arrays, or is larger than 1 GiB.
        DamageError: it is not a pickle.
    """
    if (size := path.stat().st_size) > MAX_SIZE:
        raise PolicyError(
            f"{where}: a pickle of {human_size(size)}; the limit is {human_size(MAX_SIZE)}.",
            "Check the address: the files of CIFAR are smaller.",
        )
    stream = io.BytesIO(path.read_bytes())
    try:
        unpickler = _PlainData(stream, encoding="bytes")
        unpickler.left = size
        return unpickler.load()
    except _Refused as error:
        raise PolicyError(
            f"{where}: the pickle wants to build {error}, which plain data does not need; "
            "nothing in it was run.",
            "Do not load this file anywhere. Check its address and sha256.",
        ) from None
    except _BROKEN as error:
        raise DamageError(
            f"{where}: not a pickle of plain data: {error}.", "Check its address and sha256."
        ) from None
    except (MemoryError, RecursionError) as error:
        raise DamageError(
            f"{where}: a pickle that does not end: {type(error).__name__}.", "Check its sha256."
        ) from None
