"""Reading is shared out whole and once; a lock that claims what is not so does no harm."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stage.bundle import bundle as layout
from stage.bundle import verifier
from stage.bundle.verify import verify
from stage.digests import sha256_of_bytes
from stage.errors import StageError
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


def _reseal(root: Path, lock: bytes) -> None:
    (root / layout.LOCK).write_bytes(lock)
    digests = layout.parse_manifest((root / layout.TAG_MANIFEST).read_bytes())
    (root / layout.TAG_MANIFEST).write_bytes(
        layout.manifest_text({**digests, layout.LOCK: sha256_of_bytes(lock)})
    )


def _entry(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def edit(lock: dict[str, Any]) -> None:
        lock["assets"]["bert"]["files"][0][key] = value

    return edit


def _files(value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda lock: lock["assets"]["bert"].update(files=value)


CLAIMS: dict[str, Callable[[dict[str, Any]], None]] = {
    "a path out of the bundle": _entry("path", "../../../../../../etc/passwd"),
    "an absolute path": _entry("path", "/etc/passwd"),
    "a tag file for payload": _entry("path", "stage.lock"),
    "a path that is a list": _entry("path", ["data"]),
    "a path with a zero byte": _entry("path", "data/models/bert/\0"),
    "a negative size": _entry("size", -1),
    "a size in words": _entry("size", "many"),
    "true for a size": _entry("size", True),
    "half a byte": _entry("size", 0.5),
    "a size beyond all disks": _entry("size", 10**30),
    "another size": _entry("size", 10**10),
    "no digest": _entry("sha256", None),
    "a number for a digest": _entry("sha256", 5),
    "a digest that is a path": _entry("sha256", "../../x"),
    "files by name": _files({"a": 1}),
    "files that are numbers": _files([1, 2]),
    "no files": _files(None),
    "assets in a list": lambda lock: lock.update(assets=[1]),
}


@pytest.mark.parametrize("claim", CLAIMS)
def test_a_sealed_lock_may_claim_anything(copy: Path, claim: str) -> None:
    lock = json.loads((copy / layout.LOCK).read_bytes())
    CLAIMS[claim](lock)
    _reseal(copy, (json.dumps(lock, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode())
    try:
        assert not verify(copy, jobs=2).ok
    except StageError as error:
        assert error.exit_code in (2, 3)


def test_without_a_lock_the_payload_manifest_says_what_to_read(copy: Path) -> None:
    """Damage of the payload is found although the lock cannot be believed."""
    (copy / layout.LOCK).write_bytes(b"{}")
    with open(copy / BIG, "r+b") as file:
        file.write(b"x")
    paths = {finding.path for finding in verify(copy, jobs=2).findings}
    assert {layout.LOCK, BIG} <= paths
