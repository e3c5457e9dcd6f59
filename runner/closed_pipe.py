"""Streams that outlive their reader: `runner train ... | head` must not end the training.

Once the reader of a pipe is gone, what is written there is discarded: the logs have it as well.
Every other error, such as a full disk, stays an error.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from typing import Any, TextIO


class _Pipe(io.FileIO):
    """A descriptor that leads to /dev/null as soon as nobody reads it.

    Args:
        closed: is called once, when that happens.
    """

    def __init__(
        self, descriptor: int, closed: Callable[[], None] | None = None, *, closefd: bool = False
    ) -> None:
        super().__init__(descriptor, "w", closefd=closefd)
        self._closed = closed

    def write(self, data: Any, /) -> int:  # bytes, or any other buffer
        try:
            return super().write(data)
        except BrokenPipeError:
            size = memoryview(data).nbytes
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())  # children that inherit it are safe, too
            os.close(nowhere)
            if self._closed is not None:
                self._closed()
            return size


def outliving(descriptor: int, closed: Callable[[], None]) -> TextIO:
    """A text stream on a descriptor, which it closes at its end.

    Args:
        closed: is called once, when the reader is gone.
    """
    pipe = _Pipe(descriptor, closed, closefd=True)
    return io.TextIOWrapper(io.BufferedWriter(pipe), line_buffering=True)


def outlive_readers() -> None:
    """Makes stdout and stderr of this process outlive their readers."""
    sys.stdout, sys.stderr = _made_safe(sys.stdout, 1), _made_safe(sys.stderr, 2)


def _made_safe(stream: TextIO, descriptor: int) -> TextIO:
    if not isinstance(stream, io.TextIOWrapper):  # a test's, or none at all
        return stream
    raw = getattr(stream.buffer, "raw", stream.buffer)
    if type(raw) is not io.FileIO or raw.fileno() != descriptor:
        return stream
    stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_Pipe(descriptor)),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
