"""Computes and parses digests. Each file is read once, for all its digests.

A digest has an algorithm (`Digest`). `sha256` is ours; a Hub publishes `lfs-sha256` or `git-sha1`
of a file before it is downloaded. Files larger than 64 MiB also have the sha256 of each 16 MiB
block, which shows which bytes of a large file are damaged.
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from concurrent.futures import Future

BLOCK_SIZE = 16 * 2**20
BLOCKS_ABOVE = 64 * 2**20
PIECE = 2**20  # bytes read, received and hashed at a time
PIECES_AHEAD = 8  # a reader may be so many ahead of a digest: more memory, fewer waits

_LENGTHS = {"sha256": 64, "lfs-sha256": 64, "git-sha1": 40}


@dataclass(frozen=True, order=True)
class Digest:
    """A digest and its algorithm: `sha256`, `lfs-sha256` (of a Hub's LFS file) or `git-sha1` (a git
    blob id).

    Raises:
        ValueError: unknown algorithm, or a value that is not lowercase hex of the algorithm's
            length.
    """

    algorithm: str
    value: str

    def __post_init__(self) -> None:
        if self.algorithm not in _LENGTHS:
            raise ValueError(f"unknown digest algorithm {self.algorithm!r}")
        if not is_hex(self.value, _LENGTHS[self.algorithm]):
            digits = _LENGTHS[self.algorithm]
            raise ValueError(
                f"{self.algorithm} is {digits} lowercase hex digits, not {self.value!r}"
            )

    def __str__(self) -> str:
        return f"{self.algorithm}:{self.value}"


def is_hex(value: object, length: int) -> bool:
    """Whether `value` is text of exactly `length` lowercase hex digits."""
    try:
        # Half the time of a regular expression; a lock of 20,000 files has 30,000 digests.
        return (
            isinstance(value, str) and len(value) == length and bytes.fromhex(value).hex() == value
        )
    except ValueError:
        return False


@dataclass(frozen=True, slots=True)
class FileDigests:
    """The digests of a file: git blob id if it was requested, blocks if the file is large."""

    size: int
    sha256: str
    git_sha1: str | None = None
    blocks: tuple[str, ...] = ()

    def matches(self, evidence: Digest) -> bool:
        """Whether these bytes have the digest `evidence`."""
        return self.found(evidence.algorithm) == evidence.value

    @property
    def blocks_sha256(self) -> str | None:
        """The sha256 of the file's block list; None if it has none."""
        return sha256_of_bytes(block_list(self.blocks)) if self.blocks else None

    def found(self, algorithm: str) -> str | None:
        """The digest by `algorithm`; None if it was not computed."""
        return self.git_sha1 if algorithm == "git-sha1" else self.sha256


def block_list(blocks: Iterable[str]) -> bytes:
    """The text of `blocks/<sha256>`: one line of hex per 16 MiB block of a file."""
    return "".join(f"{block}\n" for block in blocks).encode()


class Digester:
    """Digests of a stream whose length is known: call `update` with its bytes, then `result`.

    A file with block digests is hashed twice, by two threads, so that its reader waits for neither.
    Call `close` if `result` may never be called.

    Args:
        size: the number of bytes to come. A git blob id hashes the length first
            (`sha1(b"blob <size>\\0" + data)`, git's Documentation/gitformat-pack).
        git: also compute the git blob id.
    """

    def __init__(self, size: int, *, git: bool = False) -> None:
        self._sha256 = hashlib.sha256()
        # sha1 identifies a published file; it protects nothing (`usedforsecurity`: FIPS systems).
        self._git = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False) if git else None
        self._blocks = _Blocks() if size > BLOCKS_ABOVE else None
        parts: list[_Part] = [
            part for part in (self._sha256, self._git, self._blocks) if part is not None
        ]
        self._lanes = [_Lane(part) for part in parts] if self._blocks else []
        self._parts = self._lanes or parts
        self.size = 0

    def update(self, data: bytes | memoryview) -> None:
        """Adds the next bytes. They must not change: they may be hashed later."""
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
        """Ends the threads, if the result is not needed any more."""
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
    """A digest that a thread of its own computes, at most `PIECES_AHEAD` pieces behind.

    hashlib releases the GIL.
    """

    def __init__(self, part: _Part) -> None:
        # Slow to import, and `stage verify` has to begin at once.
        from concurrent.futures import ThreadPoolExecutor

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


def hash_file(
    path: Path, *, git: bool = False, progress: Callable[[int], None] | None = None
) -> FileDigests:
    """Reads a file once and returns its digests.

    Args:
        progress: called with the number of bytes just read.

    Raises:
        OSError: the file cannot be read. (A file that changes its length meanwhile has a wrong git
            id.)
    """
    with open(path, "rb", buffering=0) as source:
        size = os.fstat(source.fileno()).st_size
        # A buffer of PIECE bytes for each of 100,000 small files takes longer than the hashing.
        piece = min(PIECE, size + 1)
        with closing(Digester(size, git=git)) as digester:
            feed(digester, lambda most: source.read(min(most, piece)), progress=progress)
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
