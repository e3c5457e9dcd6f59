"""Patches from one bundle to the next: `stage patch --since`, then `stage apply`."""

from __future__ import annotations

from pathlib import Path

import pytest

from stage.bundle.bundle import LOCK, verify
from stage.carry.patch import apply, patch_since
from stage.errors import UsageError
from tests.stage.carry.patching import MIB, QUIET, size_of, stage, state


def test_an_update_carries_what_is_new_once_and_makes_the_new_bundle(
    sound: Path, new: Path, copy: Path, tmp_path: Path
) -> None:
    done = stage("patch", new, "--since", sound / LOCK, "-o", tmp_path / "patch")
    assert done.returncode == 0, done.stderr
    assert 70 * MIB < size_of(tmp_path / "patch") < 71 * MIB, "twins twice, or moved files carried"
    done = stage("apply", copy, tmp_path / "patch")
    assert done.returncode == 0, done.stderr
    assert f"bundle id {verify(new, 'fast').bundle_id}" in done.stdout
    assert state(copy) == state(new)
    assert {path.stat().st_nlink for path in copy.rglob("*") if path.is_file()} == {1}, (
        "two files share their bytes"
    )


def test_a_lock_of_another_version_beside_it_is_meant(new: Path, tmp_path: Path) -> None:
    (tmp_path / "old.lock").write_text("of an older version")
    (tmp_path / "olb.lock").write_bytes((new / LOCK).read_bytes())
    with pytest.raises(UsageError) as refused:
        patch_since(new, tmp_path / "ol.lock", tmp_path / "patch", QUIET)
    assert "old.lock" in refused.value.remedy and "olb.lock" not in refused.value.remedy


def test_an_update_does_not_drop_files_nobody_fetched(
    sound: Path, new: Path, copy: Path, tmp_path: Path
) -> None:
    patch_since(new, sound / LOCK, tmp_path / "patch", QUIET)
    (copy / "data/mine.txt").write_text("unsaved")
    before = state(copy)
    with pytest.raises(UsageError, match=r"mine\.txt"):
        apply(copy, tmp_path / "patch", QUIET)
    assert state(copy) == before
