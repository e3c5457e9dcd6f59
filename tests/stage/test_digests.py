"""One pass over the bytes, in pieces of any size, gives the digests of git and coreutils."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stage.digests import (
    Digest,
    Digester,
    FileDigests,
)


@pytest.mark.parametrize(
    ("algorithm", "value"),
    [
        ("md5", "0" * 32),
        ("sha256", "0" * 63),
        ("sha256", "A" * 64),
        ("sha256", "0" * 64 + "\n"),
        ("git-sha1", "0" * 64),
        ("lfs-sha256", "٠" * 64),
        ("", ""),
    ],
)
def test_what_is_no_digest_is_refused(algorithm: str, value: str) -> None:
    with pytest.raises(ValueError):
        Digest(algorithm, value)


def test_evidence_matches_only_its_own_algorithm() -> None:
    found = FileDigests(3, sha256="a" * 64, git_sha1="b" * 40)
    assert found.matches(Digest("sha256", "a" * 64)) and found.matches(
        Digest("lfs-sha256", "a" * 64)
    )
    assert found.matches(Digest("git-sha1", "b" * 40)) and not found.matches(
        Digest("git-sha1", "a" * 40)
    )
    assert not FileDigests(3, "a" * 64).matches(Digest("git-sha1", "b" * 40))


@given(st.binary(max_size=2000), st.lists(st.integers(1, 700)))
def test_the_pieces_do_not_matter(data: bytes, sizes: list[int]) -> None:
    digester = Digester(len(data), git=True)
    rest = memoryview(data)
    for size in sizes:
        digester.update(rest[:size])
        rest = rest[size:]
    digester.update(rest)
    found = digester.result()
    git = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    assert found == FileDigests(len(data), hashlib.sha256(data).hexdigest(), git)
