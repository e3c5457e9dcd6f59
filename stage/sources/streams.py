"""What a download can be of besides an address that speaks HTTP: bytes from an offset on, and words for what broke."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol


class Broken(Exception):
    """The bytes do not come, or stopped coming; asking again may help."""


@dataclass(frozen=True)
class Stream:
    """Bytes under way: the offset of the first of them (0 where going on is not possible), and they."""

    offset: int
    pieces: Iterator[bytes]


class ByteSource(Protocol):
    """One file somewhere."""

    def probe(self) -> tuple[int | None, str | None]:
        """How many bytes it has, and something that changes when it does; None for what cannot be known.

        Raises:
            Broken: no answer.
            StageError: it is not to be had.
        """
        ...

    def open(self, offset: int, version: str | None) -> AbstractContextManager[Stream]:
        """Its bytes from `offset` on; from the beginning if it is not the `version` any more that was probed.

        Raises:
            Broken, StageError: as for `probe`; from the pieces, too.
        """
        ...
