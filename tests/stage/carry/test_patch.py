"""Patches of damage: little to carry, nothing half done, nothing lost."""

from __future__ import annotations

import os
import random
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from stage.bundle.bundle import BAG_INFO, MANIFEST, manifest_text, parse_manifest, verify
from stage.carry.patch import apply
from stage.errors import DamageError, IncompleteError
from stage.files import sha256_of_bytes
from tests.stage.bundles import BIG, BIG_SIZE, reseal
from tests.stage.carry.patching import MIB, QUIET, patch_for, size_of, stage, state


def test_a_flipped_bit_of_a_large_file_is_repaired_by_the_whole_file(
    sound: Path, copy: Path, tmp_path: Path
) -> None:
    """The whole road by the command."""
    with open(copy / BIG, "r+b") as file:
        file.seek(40 * MIB + 5)
        file.write(b"\x01")
    done = stage("verify", copy, "--report", tmp_path / "r.json", "-q")
    assert done.returncode == 1 and f"`{BIG}`: mismatched" in done.stdout
    assert f"Carry {tmp_path}/r.json there: stage patch BUNDLE --report r.json" in done.stderr
    assert f"The report is written to {tmp_path}/r.json\n" in done.stderr
    done = stage("patch", sound, "--report", tmp_path / "r.json", "-o", tmp_path / "patch")
    assert done.returncode == 0 and "1 file, 68.2 MB" in done.stdout, done.stderr
    assert BIG_SIZE < size_of(tmp_path / "patch") < BIG_SIZE + MIB
    for there, words in ((tmp_path / "patch", "is there already"), (sound / "p", "is inside")):
        again = stage("patch", sound, "--report", tmp_path / "r.json", "-o", there)
        assert again.returncode == 2 and words in again.stderr, again.stderr
    checked = subprocess.run(
        ["sha256sum", "-c", "--quiet", "manifest-sha256.txt"], cwd=tmp_path / "patch"
    )
    assert checked.returncode == 0
    done = stage("apply", copy, tmp_path / "patch")
    assert done.returncode == 0 and f"bundle id {verify(sound, 'fast').bundle_id}" in done.stdout, (
        done.stderr
    )
    assert verify(copy).ok and sorted(p.name for p in tmp_path.iterdir()) == [
        "bundle",
        "patch",
        "r.json",
    ]


@pytest.mark.parametrize("chance", range(8))
def test_any_damage_to_the_bytes_is_repaired(
    sound: Path, copy: Path, tmp_path: Path, chance: int
) -> None:
    noise = random.Random(chance)
    paths = sorted(path for path in copy.rglob("*") if path.is_file())
    for path in noise.sample(paths, 3):
        data = bytearray(path.read_bytes())
        match noise.choice(["flip", "cut", "grow", "gone", "link", "folder"]):
            case "flip" if data:
                data[noise.randrange(len(data))] ^= 1 << noise.randrange(8)
                path.write_bytes(data)
            case "cut" if data:
                os.truncate(path, noise.randrange(len(data)))
            case "link":
                path.unlink()
                path.symlink_to("/etc/hostname")
            case "gone":
                path.unlink()
            case "folder":
                path.unlink()
                (path / "inner").mkdir(parents=True)
            case _:
                path.write_bytes(data + b"x")
    if (before := verify(copy)).bundle_id is None and not (copy / BAG_INFO).is_file():
        pytest.xfail("nothing is left that says which bundle this is")
    outcome = apply(copy, patch_for(sound, copy, tmp_path), QUIET)
    assert outcome.bundle_id == verify(sound, "fast").bundle_id and verify(copy).ok, before
    assert state(copy) == state(sound)


@pytest.mark.parametrize("name", ["stage.yaml", "data/models/bert/vocab.txt", "data"])
def test_nothing_is_written_through_a_link_in_a_workshop_that_came_with_the_bundle(
    sound: Path, copy: Path, tmp_path: Path, name: str
) -> None:
    outside = tmp_path / "precious"
    outside.mkdir() if name == "data" else outside.write_text("precious")
    for damaged in ("stage.yaml", "data/models/bert/vocab.txt"):
        (copy / damaged).write_bytes(b"damaged")
    patch = patch_for(sound, copy, tmp_path)
    link = copy / "workshop.partial" / name
    link.parent.mkdir(parents=True)
    link.symlink_to(outside)
    apply(copy, patch, QUIET)
    assert state(copy) == state(sound)
    assert not any(outside.iterdir()) if name == "data" else outside.read_text() == "precious"


def test_a_file_of_a_patch_that_no_bundle_has_is_not_taken(
    sound: Path, copy: Path, tmp_path: Path
) -> None:
    """Only paths of the lock are, and the lock is checked as each lock is."""
    (copy / "data/models/bert/vocab.txt").unlink()
    patch = patch_for(sound, copy, tmp_path)
    (patch / "data/evil.sh").write_text("evil")
    lines = parse_manifest((patch / MANIFEST).read_bytes())
    lines |= {"data/evil.sh": sha256_of_bytes(b"evil"), "data/../../escape": "0" * 64}
    (patch / MANIFEST).write_bytes(manifest_text(lines))
    reseal(patch, MANIFEST)
    apply(copy, patch, QUIET)
    assert state(copy) == state(sound) and not list(tmp_path.glob("**/escape"))


def test_extra_files_are_left_to_a_person(sound: Path, copy: Path, tmp_path: Path) -> None:
    (copy / "data/mine.txt").write_text("unsaved")
    (copy / "data/models/bert/vocab.txt").unlink()
    with pytest.raises(
        DamageError, match=r"(?s)with the patch every byte of the bundle is sound.*mine\.txt"
    ):
        apply(copy, patch_for(sound, copy, tmp_path), QUIET)
    assert not (copy / "workshop.partial").exists()
    assert (copy / "data/mine.txt").read_text() == "unsaved"
    assert [finding.path for finding in verify(copy).findings] == ["data/mine.txt"]


def test_a_disk_without_room_for_the_patch_leaves_the_bundle_unchanged(
    sound: Path, copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (copy / "data/models/bert/vocab.txt").unlink()
    patch, before = patch_for(sound, copy, tmp_path), state(copy)
    size = (sound / "data/models/bert/vocab.txt").stat().st_size
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=size - 1))
    with pytest.raises(IncompleteError, match=r"The bundle is unchanged\."):
        apply(copy, patch, QUIET)
    assert {path: data for path, data in state(copy).items() if "workshop" not in path} == before
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=10**9))
    apply(copy, patch, QUIET)
    assert state(copy) == state(sound)
