"""One pass over the bytes, in pieces of any size, gives the digests of git and coreutils."""

from __future__ import annotations

import hashlib
import io
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stage.digests import (
    Digest,
    Digester,
    FileDigests,
    feed,
    hash_file,
    is_hex,
)


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


def test_git_and_coreutils_agree(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"some\nlines\r\n\0and bytes\xff" * 1000)
    found = hash_file(file, git=True)
    assert (
        subprocess.check_output(["git", "hash-object", "--no-filters", file], text=True).strip()
        == found.git_sha1
    )
    assert subprocess.check_output(["sha256sum", file], text=True).split()[0] == found.sha256


def test_an_empty_file_has_digests(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    found = hash_file(tmp_path / "empty", git=True)
    assert found.size == 0
    assert (
        found.git_sha1 == "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391"
    )  # git's well-known empty blob


@given(st.binary(max_size=300))
def test_feeding_counts(data: bytes) -> None:
    source, seen = io.BytesIO(data), []
    digester = Digester(len(data))
    assert feed(digester, source.read, progress=seen.append) == len(data) == sum(seen)
    assert digester.result().sha256 == hashlib.sha256(data).hexdigest()


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


@given(st.text(max_size=66) | st.none() | st.integers())
def test_hex_is_lowercase_ascii_of_the_right_length(value: object) -> None:
    expected = isinstance(value, str) and len(value) == 4 and set(value) <= set("0123456789abcdef")
    assert is_hex(value, 4) == expected
