"""Computes and parses digests: bytes go by once, every digest asked for comes out.

A digest travels with its algorithm (`Digest`). Three algorithms occur: `sha256` is ours and canonical;
`lfs-sha256` and `git-sha1` are the evidence a Hub publishes about a file before it is downloaded.
Files larger than 64 MiB also get the sha256 of each 16 MiB block, which tells which bytes of a large file are bad.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

BLOCK_SIZE = 16 * 2**20
BLOCKS_ABOVE = 64 * 2**20
READ_SIZE = 4 * 2**20

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

    Args:
        size: the number of bytes to come. A git blob id hashes the length first
            (`sha1(b"blob <size>\\0" + data)`, git's Documentation/gitformat-pack), so it must be known.
        git: also compute the git blob id.
    """

    def __init__(self, size: int, *, git: bool = False) -> None:
        self._sha256 = hashlib.sha256()
        # sha1 here identifies what a server published; it protects nothing (hence usedforsecurity for FIPS systems).
        self._git = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False) if git else None
        self._with_blocks = size > BLOCKS_ABOVE
        self._blocks: list[str] = []
        self._block = hashlib.sha256()
        self._in_block = 0
        self.size = 0

    def update(self, data: bytes | bytearray | memoryview) -> None:
        """Takes the next bytes."""
        self._sha256.update(data)
        if self._git is not None:
            self._git.update(data)
        if self._with_blocks:
            self._update_blocks(memoryview(data))
        self.size += len(data)

    def _update_blocks(self, view: memoryview) -> None:
        while len(view):
            part = view[: BLOCK_SIZE - self._in_block]
            self._block.update(part)
            self._in_block += len(part)
            view = view[len(part) :]
            if self._in_block == BLOCK_SIZE:
                self._close_block()

    def _close_block(self) -> None:
        self._blocks.append(self._block.hexdigest())
        self._block, self._in_block = hashlib.sha256(), 0

    def result(self) -> FileDigests:
        """The digests of all bytes seen. Call once, at the end."""
        if self._in_block:
            self._close_block()
        git = self._git.hexdigest() if self._git is not None else None
        return FileDigests(self.size, self._sha256.hexdigest(), git, tuple(self._blocks))


def hash_file(path: Path, *, git: bool = False, progress: Callable[[int], None] | None = None) -> FileDigests:
    """Reads a file once and returns its digests.

    Args:
        progress: called with the number of bytes just read.

    Raises:
        OSError: the file cannot be read. (A file that changes length while being read has a wrong git id.)
    """
    with open(path, "rb", buffering=0) as source:
        digester = Digester(path.stat().st_size, git=git)
        feed(digester, source.readinto, progress=progress)
    return digester.result()


def feed(
    digester: Digester,
    readinto: Callable[[memoryview], int | None],
    *,
    limit: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> int:
    """Passes bytes from `readinto` to `digester` until the end or `limit` bytes; returns how many."""
    buffer = memoryview(bytearray(READ_SIZE))
    total = 0
    while limit is None or total < limit:
        want = len(buffer) if limit is None else min(len(buffer), limit - total)
        count = readinto(buffer[:want])
        if not count:
            break
        digester.update(buffer[:count])
        total += count
        if progress:
            progress(count)
    return total


def sha256_of_bytes(data: bytes) -> str:
    """The sha256 of bytes in memory, as hex."""
    return hashlib.sha256(data).hexdigest()
