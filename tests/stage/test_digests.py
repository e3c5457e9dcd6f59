"""One pass over the bytes, in pieces of any size, gives the digests of git and coreutils."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stage.files import (
    Digest,
    Digester,
    Expected,
    FileDigests,
    MismatchError,
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


A, B, C = "a" * 64, "b" * 40, "c" * 64
FOUND = FileDigests(3, sha256=A, git_sha1=B)


@pytest.mark.parametrize(
    ("expected", "found", "said"),
    [
        (Expected("x", None), FOUND, None),
        (Expected("x", 3, A, Digest("git-sha1", B)), FOUND, None),
        (Expected("x", None, A, Digest("lfs-sha256", A)), FOUND, None),
        (Expected("x", 4_000, C), FOUND, "it has 3 bytes, not 4,000"),
        (Expected("x", 3, C), FOUND, f"its sha256 is {A}, not {C}"),
        (Expected("x", 3, A, Digest("lfs-sha256", C)), FOUND, f"its lfs-sha256 is {A}, not {C}"),
        (
            Expected("x", 3, C, Digest("git-sha1", C[:40])),
            FOUND,
            f"its git-sha1 is {B}, not {C[:40]}",
        ),
        (
            Expected("x", None, A, Digest("git-sha1", B)),
            FileDigests(3, A),
            f"its git-sha1 is None, not {B}",
        ),
    ],
)
def test_bytes_are_compared_with_all_that_is_known_the_sources_own_digest_first(
    expected: Expected, found: FileDigests, said: str | None
) -> None:
    if said is None:
        assert expected.check(found) == found
        return
    with pytest.raises(MismatchError) as caught:
        expected.check(found)
    assert (caught.value.problem, caught.value.found) == (said, found)


def test_a_file_is_hashed_with_the_digests_that_are_expected_of_it(tmp_path: Path) -> None:
    file, git = tmp_path / "x", hashlib.sha1(b"blob 3\0abc").hexdigest()
    file.write_bytes(b"abc")
    read: list[int] = []
    expected = Expected("x", 3, upstream=Digest("git-sha1", git))
    assert expected.verify(file, read.append).git_sha1 == git
    assert read == [3]
    file.write_bytes(b"abd")
    with pytest.raises(MismatchError, match=f"not {git}"):
        expected.verify(file)


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
