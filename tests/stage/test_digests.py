"""One pass over the bytes, in pieces of any size, gives the digests of git and coreutils."""

from __future__ import annotations

import pytest

from stage.digests import (
    Digest,
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
