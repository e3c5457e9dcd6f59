"""The shared store: contents once on disk, always hashed when taken."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from stage.bundle.bundle import verify
from stage.errors import UsageError
from stage.files import hash_file
from stage.staging.working_folder import store_from
from tests.support.servers.hubs import TestHub
from tests.support.staging import MANIFEST, MODEL, Laptop, model_files

WEIGHTS = "data/models/tiny-bert/model.safetensors"
SHM = Path("/dev/shm")  # without reflinks on every Linux, and not the disk of most folders


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder where sharing means hard links."""
    if SHM.is_dir():
        with tempfile.TemporaryDirectory(dir=SHM, prefix="airlift-") as name:
            yield Path(name)
    else:
        yield tmp_path


@pytest.fixture
def sharing(folder: Path, tmp_path: Path) -> Iterator[Laptop]:
    """A laptop with a store in the user's cache folder, as without settings."""
    with ExitStack() as stack:
        laptop = Laptop(folder, TestHub(tmp_path / "hub", stack), {"AIRLIFT_STORE": ""})
        laptop.publish()
        laptop.write(MANIFEST)
        yield laptop


def entry_of(laptop: Laptop, file: Path) -> Path:
    sha256 = hash_file(file).sha256
    return laptop.folder / ".cache/airlift/store/sha256" / sha256[:2] / sha256


def asked_for(laptop: Laptop, name: str) -> int:
    return len(laptop.hub.requests(f"/resolve/.*{name}"))


def flip(file: Path) -> None:
    """Flips a bit in place: through every name of the file."""
    file.chmod(0o644)
    with open(file, "r+b") as opened:
        opened.seek(1_000_000)
        byte = opened.read(1)[0]
        opened.seek(1_000_000)
        opened.write(bytes([byte ^ 1]))


def other_manifest(laptop: Laptop, asset: str = "my-bert") -> None:
    (laptop.folder / "other.yaml").write_text(
        f"format: 1\nassets:\n  {asset}:\n    model: {MODEL}\n"
    )


def fetch_other(
    laptop: Laptop, *options: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    done = laptop.stage(
        "fetch", "other.yaml", "-o", "other", "--no-offline-check", *options, **environment
    )
    assert done.returncode == 0, done.stderr
    return done


def test_files_that_two_manifests_share_are_fetched_once_and_are_on_disk_once(
    sharing: Laptop,
) -> None:
    sharing.fetched()
    other_manifest(sharing)
    plan = fetch_other(sharing, "--dry-run").stderr
    assert "would fetch 4 files, " in plan and "; 1 file (3 MB) more are on this machine" in plan
    done = fetch_other(sharing)
    assert asked_for(sharing, "model.safetensors") == 1
    assert "1 file (3 MB) was here already, in the store" in done.stderr
    mine, theirs = (
        sharing.bundle / WEIGHTS,
        sharing.folder / "other/data/models/my-bert/model.safetensors",
    )
    assert mine.stat().st_ino == theirs.stat().st_ino == entry_of(sharing, mine).stat().st_ino
    assert verify(sharing.bundle).ok and verify(sharing.folder / "other").ok


def test_a_shared_file_is_read_only_and_a_small_one_is_nobody_elses(sharing: Laptop) -> None:
    sharing.fetched()
    assert (sharing.bundle / WEIGHTS).stat().st_mode & 0o222 == 0
    config = (sharing.bundle / WEIGHTS).with_name("config.json")
    assert config.stat().st_mode & 0o200 and config.stat().st_nlink == 1


def test_damage_in_the_store_is_noticed_named_and_fetched_again(
    sharing: Laptop, undisturbed_id: str
) -> None:
    """A user edits a file of one bundle in place: the store gets the same damage."""
    sharing.fetched()
    flip(sharing.bundle / WEIGHTS)
    done = sharing.fetch("again")
    assert done.returncode == 0, done.stderr
    assert (
        "the store's copy is damaged" in done.stderr
        and "Bundles on this disk share that file and its damage" in done.stderr
    )
    assert asked_for(sharing, "model.safetensors") == 2
    assert verify(sharing.folder / "again").ok and not verify(sharing.bundle).ok
    assert sharing.fetched() == undisturbed_id  # repaired from the store, which is sound again
    assert asked_for(sharing, "model.safetensors") == 2


def test_a_link_in_the_store_is_not_followed(sharing: Laptop) -> None:
    sharing.fetched()
    entry = entry_of(sharing, sharing.bundle / WEIGHTS)
    entry.unlink()
    entry.symlink_to(sharing.bundle / WEIGHTS)
    sharing.fetched("again")
    assert (
        not (sharing.folder / "again" / WEIGHTS).is_symlink()
        and asked_for(sharing, "model.safetensors") == 2
    )


def test_what_an_interrupted_fetch_took_is_not_written_through(sharing: Laptop) -> None:
    """Killed between link and rename: a later download must not write into the store's file."""
    sharing.fetched()
    entry = entry_of(sharing, sharing.bundle / WEIGHTS)
    again = sharing.folder / "again" / WEIGHTS
    again.parent.mkdir(parents=True)
    (sharing.folder / "again" / "fetch.partial").write_text(f"{WEIGHTS}\n")
    os.link(entry, again.with_name("store-0-1.partial"))
    sharing.fetched("again", AIRLIFT_STORE="none")
    assert hash_file(entry).sha256 == entry.name
    assert not list(again.parent.glob("*.partial"))


@pytest.mark.parametrize("is_sound", [True, False], ids=["sound", "damaged"])
def test_a_file_of_the_cache_of_huggingface_hub_is_taken_if_its_bytes_are_right(
    sharing: Laptop, is_sound: bool
) -> None:
    weights = model_files()["model.safetensors"]
    blobs = sharing.folder / "hf/hub/models--acme--bert/blobs"
    blobs.mkdir(parents=True)
    blob = blobs / hashlib.sha256(weights).hexdigest()
    blob.write_bytes(weights if is_sound else bytes(len(weights)))
    done = sharing.fetch()
    assert done.returncode == 0 and verify(sharing.bundle).ok, done.stderr
    assert ("1 file (3 MB) was here already, in the cache" in done.stderr) == is_sound
    assert asked_for(sharing, "model.safetensors") == (0 if is_sound else 1)
    # No second name: the owner of the cache may write to it, and keeps that right.
    assert (sharing.bundle / WEIGHTS).stat().st_ino != blob.stat().st_ino
    assert blob.stat().st_nlink == 1 and blob.stat().st_mode & 0o200


def test_a_damaged_file_is_not_given_a_new_name(sharing: Laptop) -> None:
    sharing.fetched(AIRLIFT_STORE="none")
    flip(sharing.bundle / WEIGHTS)
    sharing.write(MANIFEST.replace("  tiny-bert:", "  bert:"))
    sharing.fetched(AIRLIFT_STORE="none")
    assert verify(sharing.bundle).ok and asked_for(sharing, "model.safetensors") == 2


def test_a_store_that_cannot_be_written_is_no_reason_to_fail(sharing: Laptop) -> None:
    (sharing.folder / "occupied").write_text("")
    done = sharing.fetch(AIRLIFT_STORE=str(sharing.folder / "occupied"))
    assert (
        done.returncode == 0
        and "not kept in the store" in done.stderr
        and verify(sharing.bundle).ok
    )


def test_a_store_on_another_disk_gives_copies_and_keeps_nothing(
    sharing: Laptop, tmp_path: Path
) -> None:
    if tmp_path.stat().st_dev == sharing.folder.stat().st_dev:
        pytest.skip("one disk here")
    sharing.fetched()
    done = sharing.fetch(str(tmp_path / "bundle"))
    assert done.returncode == 0 and "1 file (3 MB) was here already, in the store" in done.stderr, (
        done.stderr
    )
    assert (tmp_path / "bundle" / WEIGHTS).stat().st_nlink == 1 and verify(tmp_path / "bundle").ok
    assert asked_for(sharing, "model.safetensors") == 1
    done = sharing.fetch("new", AIRLIFT_STORE=str(tmp_path / "store"))
    assert "is on another disk" in done.stderr
    assert not list((tmp_path / "store").rglob("*.partial"))


def test_a_store_at_a_relative_path_is_refused() -> None:
    with pytest.raises(UsageError, match="absolute"):
        store_from({"AIRLIFT_STORE": "store"})


def test_the_store_changes_no_bundle_id(sharing: Laptop, undisturbed_id: str) -> None:
    assert sharing.fetched() == sharing.fetched("again") == undisturbed_id


def test_what_was_converted_is_not_converted_again(sharing: Laptop) -> None:
    lines = "".join(f"{number},{os.urandom(40).hex()}\n" for number in range(30_000))
    (sharing.folder / "mine.csv").write_text(f"n,text\n{lines}")
    (sharing.folder / "other.yaml").write_text(
        "format: 1\nassets:\n  m:\n    path: mine.csv\n    convert: csv\n"
    )
    fetch_other(sharing)
    shutil.rmtree(sharing.folder / "other")
    (sharing.folder / "mine.csv").unlink()
    said = fetch_other(sharing).stderr
    assert re.search(r"1 file \(1\.\d+ MB\) was here already, in the store", said), said


def test_a_dry_run_says_what_is_here_already(sharing: Laptop) -> None:
    sharing.fetched()
    done = sharing.fetch("again", "--dry-run")
    assert (
        re.search(rf"share +3 MB +{WEIGHTS}", done.stderr)
        and "1 file (3 MB) more are" in done.stderr
    )
    assert not (sharing.folder / "again").exists()
