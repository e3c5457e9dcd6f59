"""Reading is shared out whole and once; a lock that claims what is not so does no harm."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stage.bundle import bundle as layout
from stage.bundle import verifier
from stage.bundle.verify import verify
from tests.stage.bundles import BIG, make_bundle

files = st.lists(st.integers(0, 100_000) | st.integers(65 * 2**20, 2**36), max_size=40)


@given(files, st.integers(1, 300))
def test_shares_are_all_there_is_to_read_and_no_more(sizes: list[int], jobs: int) -> None:
    sizes = sorted(sizes, reverse=True)
    shared = verifier.share_out(sizes, jobs)
    assert list(itertools.chain(*shared)) == list(range(len(sizes)))
    assert all(shared) and len(shared) <= 2048
    # A share ends with the file that fills it.
    costs = [sum(sizes[place] for place in share[:-1]) for share in shared]
    assert not costs or max(costs) <= max(2**23, sum(sizes) // 32 + 2**21)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bundle(tmp_path_factory.mktemp("sound") / "bundle").root


@pytest.fixture
def copy(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "bundle"))


def test_without_a_lock_the_payload_manifest_says_what_to_read(copy: Path) -> None:
    """Damage of the payload is found although the lock cannot be believed."""
    (copy / layout.LOCK).write_bytes(b"{}")
    with open(copy / BIG, "r+b") as file:
        file.write(b"x")
    paths = {finding.path for finding in verify(copy, jobs=2).findings}
    assert {layout.LOCK, BIG} <= paths
