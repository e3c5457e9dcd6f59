"""Computes and parses digests: bytes go by once, every digest asked for comes out.

A digest travels with its algorithm (`Digest`). Three algorithms occur: `sha256` is ours and canonical;
`lfs-sha256` and `git-sha1` are the evidence a Hub publishes about a file before it is downloaded.
Files larger than 64 MiB also get the sha256 of each 16 MiB block, which tells which bytes of a large file are bad.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections import deque
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from concurrent.futures import Future

BLOCK_SIZE = 16 * 2**20
BLOCKS_ABOVE = 64 * 2**20
PIECE = 2**20  # read, received and hashed at a time
PIECES_AHEAD = 8  # what a reader may be ahead of a digest: memory against evenness

_HEX = re.compile(r"[0-9a-f]+").fullmatch
_LENGTHS = {"sha256": 64, "lfs-sha256": 64, "git-sha1": 40}


@dataclass(frozen=True, order=True)
class Digest:
    """A digest and its algorithm: `sha256`, `lfs-sha256` (a Hub's word on an LFS file) or `git-sha1` (a git blob id).

    Raises:
        ValueError: unknown algorithm, or a value that is not lowercase hex of the algorithm's length.
    """

    algorithm: str
    value: str

    def __post_init__(self) -> None:
        if self.algorithm not in _LENGTHS:
            raise ValueError(f"unknown digest algorithm {self.algorithm!r}")
        if not is_hex(self.value, _LENGTHS[self.algorithm]):
            raise ValueError(f"{self.algorithm} is {_LENGTHS[self.algorithm]} lowercase hex digits, not {self.value!r}")

    def __str__(self) -> str:
        return f"{self.algorithm}:{self.value}"


def is_hex(value: object, length: int) -> bool:
    """Whether `value` is text of exactly `length` lowercase hex digits."""
    return isinstance(value, str) and len(value) == length and _HEX(value) is not None


@dataclass(frozen=True)
class FileDigests:
    """What is known of a file once its bytes went by: size, sha256, git blob id if asked for, blocks if large."""

    size: int
    sha256: str
    git_sha1: str | None = None
    blocks: tuple[str, ...] = ()

    def matches(self, evidence: Digest) -> bool:
        """Whether these bytes are the ones `evidence` speaks of."""
        return self.found(evidence.algorithm) == evidence.value

    def found(self, algorithm: str) -> str | None:
        """The value of these bytes under `algorithm`; None if it was not computed."""
        return self.git_sha1 if algorithm == "git-sha1" else self.sha256


class Digester:
    """Digests of a stream whose length is known: feed it with `update`, read `result`.

    A file with block digests is hashed twice, each time by a thread of its own, so that whoever reads or receives it
    waits for neither. `close` it where `result` may never be asked for.

    Args:
        size: the number of bytes to come. A git blob id hashes the length first
            (`sha1(b"blob <size>\\0" + data)`, git's Documentation/gitformat-pack), so it must be known.
        git: also compute the git blob id.
    """

    def __init__(self, size: int, *, git: bool = False) -> None:
        self._sha256 = hashlib.sha256()
        # sha1 here identifies what a server published; it protects nothing (hence usedforsecurity for FIPS systems).
        self._git = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False) if git else None
        self._blocks = _Blocks() if size > BLOCKS_ABOVE else None
        parts: list[_Part] = [part for part in (self._sha256, self._git, self._blocks) if part is not None]
        self._lanes = [_Lane(part) for part in parts] if self._blocks else []
        self._parts = self._lanes or parts
        self.size = 0

    def update(self, data: bytes | memoryview) -> None:
        """Takes the next bytes, which must not change afterwards: they may be hashed later."""
        for part in self._parts:
            part.update(data)
        self.size += len(data)

    def result(self) -> FileDigests:
        """The digests of all bytes seen. Call once, at the end."""
        for lane in self._lanes:
            lane.finish()
        git = self._git.hexdigest() if self._git is not None else None
        blocks = self._blocks.hexdigests() if self._blocks is not None else ()
        return FileDigests(self.size, self._sha256.hexdigest(), git, blocks)

    def close(self) -> None:
        """Ends the threads where nobody wants the result any more."""
        for lane in self._lanes:
            lane.abandon()


class _Part(Protocol):
    def update(self, data: bytes | memoryview, /) -> None: ...


class _Blocks:
    """The sha256 of each block of a stream."""

    def __init__(self) -> None:
        self._done: list[str] = []
        self._block = hashlib.sha256()
        self._in_block = 0

    def update(self, data: bytes | memoryview, /) -> None:
        view = memoryview(data)
        while len(view):
            part = view[: BLOCK_SIZE - self._in_block]
            self._block.update(part)
            self._in_block += len(part)
            view = view[len(part) :]
            if self._in_block == BLOCK_SIZE:
                self._close_block()

    def _close_block(self) -> None:
        self._done.append(self._block.hexdigest())
        self._block, self._in_block = hashlib.sha256(), 0

    def hexdigests(self) -> tuple[str, ...]:
        if self._in_block:
            self._close_block()
        return tuple(self._done)


class _Lane:
    """One digest, computed by a thread of its own, at most `PIECES_AHEAD` pieces behind (hashlib releases the GIL)."""

    def __init__(self, part: _Part) -> None:
        from concurrent.futures import ThreadPoolExecutor  # slow to import, and `stage verify` has to begin at once

        self._part = part
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="digest")
        self._to_come: deque[Future[None]] = deque()

    def update(self, data: bytes | memoryview, /) -> None:
        if len(self._to_come) == PIECES_AHEAD:
            self._to_come.popleft().result()
        self._to_come.append(self._thread.submit(self._part.update, data))

    def finish(self) -> None:
        while self._to_come:
            self._to_come.popleft().result()
        self._thread.shutdown()

    def abandon(self) -> None:
        self._thread.shutdown(cancel_futures=True)


def hash_file(path: Path, *, git: bool = False, progress: Callable[[int], None] | None = None) -> FileDigests:
    """Reads a file once and returns its digests.

    Args:
        progress: called with the number of bytes just read.

    Raises:
        OSError: the file cannot be read. (A file that changes length while being read has a wrong git id.)
    """
    with (
        open(path, "rb", buffering=0) as source,
        closing(Digester(os.fstat(source.fileno()).st_size, git=git)) as digester,
    ):
        feed(digester, source.read, progress=progress)
        return digester.result()


def feed(
    digester: Digester,
    read: Callable[[int], bytes | None],
    *,
    limit: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> int:
    """Passes bytes from `read` to `digester` until the end or `limit` bytes; returns how many."""
    total = 0
    while limit is None or total < limit:
        piece = read(PIECE if limit is None else min(PIECE, limit - total))
        if not piece:
            break
        digester.update(piece)
        total += len(piece)
        if progress:
            progress(len(piece))
    return total


def sha256_of_bytes(data: bytes) -> str:
    """The sha256 of bytes in memory, as hex."""
    return hashlib.sha256(data).hexdigest()
