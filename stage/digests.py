"""Computes and parses digests. Each file is read once, for all its digests.

A digest has an algorithm (`Digest`). `sha256` is ours; a Hub publishes `lfs-sha256` or `git-sha1`
of a file before it is downloaded.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

PIECE = 2**20  # bytes read, received and hashed at a time

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
    """The digests of a file: git blob id if it was requested."""

    size: int
    sha256: str
    git_sha1: str | None = None

    def found(self, algorithm: str) -> str | None:
        """The digest by `algorithm`; None if it was not computed."""
        return self.git_sha1 if algorithm == "git-sha1" else self.sha256


class MismatchError(Exception):
    """Bytes that are not the expected ones.

    Attributes:
        problem: how they differ, for a message.
        found: the digests that they have.
    """

    def __init__(self, problem: str, found: FileDigests) -> None:
        super().__init__(problem)
        self.problem, self.found = problem, found


@dataclass(frozen=True)
class Expected:
    """What a file must be, as a lock, a manifest or a server says it before its bytes are here.

    Attributes:
        path: where its source has it: a path in a repository or a folder, or an address.
        size: bytes; None while unknown.
        sha256: hex; None while unknown.
        upstream: the digest that the source published, if any.
    """

    path: str
    size: int | None
    sha256: str | None = None
    upstream: Digest | None = None

    @property
    def evidence(self) -> tuple[Digest, ...]:
        """The known digests, the source's own first."""
        own = () if self.sha256 is None else (Digest("sha256", self.sha256),)
        return own if self.upstream is None else (self.upstream, *own)

    @property
    def needs_git(self) -> bool:
        """Whether the git blob id has to be computed as well."""
        return self.upstream is not None and self.upstream.algorithm == "git-sha1"

    def check(self, digests: FileDigests) -> FileDigests:
        """The digests of bytes that were hashed on their way, if they are the expected ones.

        Raises:
            MismatchError: they are not.
        """
        if self.size not in (None, digests.size):
            raise MismatchError(f"it has {digests.size:,} bytes, not {self.size:,}", digests)
        for digest in self.evidence:
            found = digests.found(digest.algorithm)
            if found != digest.value:
                problem = f"its {digest.algorithm} is {found}, not {digest.value}"
                raise MismatchError(problem, digests)
        return digests

    def verify(self, path: Path, progress: Callable[[int], None] | None = None) -> FileDigests:
        """The digests of a file whose bytes are the expected ones.

        Args:
            progress: called with the number of bytes just read.

        Raises:
            MismatchError: they are not.
            OSError: the file cannot be read.
        """
        return self.check(hash_file(path, git=self.needs_git, progress=progress))


class Digester:
    """Digests of a stream whose length is known: call `update` with its bytes, then `result`.

    Args:
        size: the number of bytes to come. A git blob id hashes the length first
            (`sha1(b"blob <size>\\0" + data)`, git's Documentation/gitformat-pack).
        git: also compute the git blob id.
    """

    def __init__(self, size: int, *, git: bool = False) -> None:
        self._sha256 = hashlib.sha256()
        # sha1 identifies a published file; it protects nothing (`usedforsecurity`: FIPS systems).
        self._git = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False) if git else None
        self.size = 0

    def update(self, data: bytes | memoryview) -> None:
        """Adds the next bytes."""
        self._sha256.update(data)
        if self._git is not None:
            self._git.update(data)
        self.size += len(data)

    def result(self) -> FileDigests:
        """The digests of all bytes seen."""
        git = self._git.hexdigest() if self._git is not None else None
        return FileDigests(self.size, self._sha256.hexdigest(), git)


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
        digester = Digester(size, git=git)
        feed(digester, lambda most: source.read(min(most, piece)), progress=progress)
        return digester.result()


def feed(
    digester: Digester,
    read: Callable[[int], bytes | None],
    *,
    progress: Callable[[int], None] | None = None,
) -> int:
    """Passes bytes from `read` to `digester` until the end; returns how many."""
    total = 0
    while piece := read(PIECE):
        digester.update(piece)
        total += len(piece)
        if progress:
            progress(len(piece))
    return total


def sha256_of_bytes(data: bytes) -> str:
    """The sha256 of bytes in memory, as hex."""
    return hashlib.sha256(data).hexdigest()
