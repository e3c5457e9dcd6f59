"""Patches from one bundle to the next: `stage patch --since`, then `stage apply`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from stage.bundle import bundle as layout
from stage.bundle.verify import verify
from stage.carry.apply import apply
from stage.carry.patch import patch_since
from stage.errors import DamageError, PolicyError, UsageError
from tests.stage.bundles import make_bundle
from tests.stage.carry.patching import MIB, QUIET, new_version, patch_for, size_of, stage, state


def test_an_update_carries_what_is_new_once_and_makes_the_new_bundle(
    sound: Path, new: Path, copy: Path, tmp_path: Path
) -> None:
    done = stage("patch", new, "--since", sound / layout.LOCK, "-o", tmp_path / "patch")
    assert done.returncode == 0, done.stderr
    assert 70 * MIB < size_of(tmp_path / "patch") < 71 * MIB, "twins twice, or moved files carried"
    done = stage("apply", copy, tmp_path / "patch")
    assert done.returncode == 0, done.stderr
    assert f"bundle id {verify(new, 'fast').bundle_id}" in done.stdout
    assert state(copy) == state(new)
    assert {path.stat().st_nlink for path in copy.rglob("*") if path.is_file()} == {1}, (
        "two files share their bytes"
    )
    again = stage("apply", copy, tmp_path / "patch")
    assert again.returncode == 0 and state(copy) == state(new), again.stderr


def test_an_update_does_not_drop_files_nobody_fetched(
    sound: Path, new: Path, copy: Path, tmp_path: Path
) -> None:
    patch_since(new, sound / layout.LOCK, tmp_path / "patch", QUIET)
    (copy / "data/mine.txt").write_text("unsaved")
    before = state(copy)
    with pytest.raises(UsageError, match=r"mine\.txt"):
        apply(copy, tmp_path / "patch", QUIET)
    assert state(copy) == before


def test_an_update_that_counts_on_a_damaged_file_says_so_and_changes_nothing(
    sound: Path, new: Path, copy: Path, tmp_path: Path
) -> None:
    patch_since(new, sound / layout.LOCK, tmp_path / "patch", QUIET)
    with open(copy / "data/models/bert/model.safetensors", "r+b") as file:
        file.write(b"bad")
    before = state(copy)
    with pytest.raises(DamageError, match="needs a file of the old bundle"):
        apply(copy, tmp_path / "patch", QUIET)
    assert state(copy) == before


@pytest.fixture(scope="module")
def small_update(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """An old bundle without large files, a new one, and the patch between them."""
    folder = tmp_path_factory.mktemp("small")
    old = make_bundle(folder / "old", big=False).root
    new = new_version(old, folder / "new", big=False)
    patch_since(new, old / layout.LOCK, folder / "patch", QUIET)
    return old, new, folder / "patch"


def with_a_mount(folder: Path, mount: str, script: str) -> subprocess.CompletedProcess[str]:
    """A shell in the folder `folder`, with something mounted at `disk` that nobody else sees."""
    (folder / "disk").mkdir()
    namespace = ["unshare", "-m" if os.geteuid() == 0 else "-rm"]
    command = [*namespace, "sh", "-c", f"{mount} disk || exit 99\n{script}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=folder)
    if done.returncode == 99 or "unshare:" in done.stderr:
        pytest.skip("cannot mount here")
    return done


def test_a_bundle_behind_a_link_to_another_disk_is_updated(
    small_update: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    old, new, patch = small_update
    (tmp_path / "link").symlink_to("disk/bundle")
    script = f"""cp -r {old} disk/bundle && {sys.executable} -m stage apply link {patch} &&
    diff -r disk/bundle {new} && ls disk . """
    done = with_a_mount(tmp_path, "mount -t tmpfs none", script)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ".partial" not in done.stdout


@pytest.mark.parametrize("mount", ["mount -t tmpfs none", "mount --bind bundle"])
def test_a_bundle_that_is_a_mount_point_is_updated(
    small_update: tuple[Path, Path, Path], tmp_path: Path, mount: str
) -> None:
    """As a container sees it: nothing beside the bundle can be renamed into it."""
    old, new, patch = small_update
    shutil.copytree(old, tmp_path / "bundle")
    script = f"""[ -e disk/data ] || cp -r bundle/. disk
    {sys.executable} -m stage apply disk {patch} && diff -r disk {new}"""
    done = with_a_mount(tmp_path, mount, script)
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_empty_folder_in_a_files_place_makes_room_and_a_full_one_is_refused(
    small_update: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    old, new, patch = small_update
    for name in ("update", "repair", "full"):
        shutil.copytree(old, tmp_path / name)
        payload = "data/files/big/new.bin" if name == "update" else "data/models/bert/vocab.txt"
        for path in (payload, layout.MANIFEST, layout.TAG_MANIFEST):
            (tmp_path / name / path).unlink(missing_ok=True)
            (tmp_path / name / path / "inner").mkdir(parents=True)
    apply(tmp_path / "update", patch, QUIET)
    assert state(tmp_path / "update") == state(new)
    repair = patch_for(old, tmp_path / "repair", tmp_path)
    (tmp_path / "full/data/models/bert/vocab.txt/inner/mine").write_text("unsaved")
    before = state(tmp_path / "full")
    with pytest.raises(PolicyError, match="a folder with files is in the place of a file"):
        apply(tmp_path / "full", repair, QUIET)
    assert state(tmp_path / "full") == before
    apply(tmp_path / "repair", repair, QUIET)
    assert state(tmp_path / "repair") == state(old) and verify(tmp_path / "repair").ok
