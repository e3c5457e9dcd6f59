"""A push to a folder of this machine: nothing sound there is lost."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from stage.bundle.bundle import verify
from stage.bundle.receipt import Receipt, find_receipt
from stage.bundle.verifier import state_folder
from stage.carry.push import _wait_for_or_end
from stage.carry.ssh import PushTarget
from tests.remedies.obeyed import in_it, obeys
from tests.stage.bundles import make_bundle
from tests.stage.carry.conftest import CONFIG, TAGS, WEIGHTS, flip, push, push_here
from tests.support.servers.sshd import Sshd

pytestmark = pytest.mark.usefixtures("tools")


def test_a_folder_here_is_a_target_too(bundle: Path, tmp_path: Path) -> None:
    there = tmp_path / "disk" / "bundle"
    there.parent.mkdir()
    command = [sys.executable, "-m", "stage", "push", str(bundle), str(there)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert verify(there).ok
    # The next command that is printed, `runner check`, knows that every byte was read.
    assert isinstance(find_receipt(state_folder(os.environ), there), Receipt)
    flip(there / WEIGHTS, 1)
    assert subprocess.run(command, capture_output=True, timeout=60).returncode == 0
    assert verify(there).ok
    inside = subprocess.run(
        [*command[:-1], str(bundle / "copy")], capture_output=True, text=True, timeout=60
    )
    assert inside.returncode == 2 and "lies inside" in inside.stderr


def test_what_our_own_push_left_on_a_disk_without_inodes_is_gone_on_with(
    bundle: Path, tmp_path: Path
) -> None:
    """Folders alone are nobody's; and the first file that is written shows whose the rest is."""
    there = tmp_path / "disk/bundle"
    (there / "data/models").mkdir(parents=True)
    (there / "data/mine.txt").write_text("mine")
    said = push_here(bundle, there).stderr
    assert "is a folder with other things in it" in said and (there / "data/mine.txt").exists()
    (there / "data/mine.txt").unlink()
    small = f"mount -t tmpfs -o nr_inodes=12 tmpfs {there}"
    if os.geteuid() == 0 and subprocess.run(small.split(), capture_output=True).returncode == 0:
        try:
            assert push_here(bundle, there).returncode == 5
            assert (there / "bagit.txt").exists()
            subprocess.run(f"mount -o remount,nr_inodes=99 {there}".split(), check=True)
            assert push_here(bundle, there).returncode == 0 and verify(there).ok
        finally:
            subprocess.run(["umount", "-l", there], check=True)
    assert push_here(bundle, there).returncode == 0 and verify(there).ok


@pytest.mark.parametrize("by_ssh", [True, False], ids=["ssh", "here"])
def test_a_file_with_other_names_there_is_replaced_and_what_has_the_other_names_stays_sound(
    sshd: Sshd, tmp_path: Path, by_ssh: bool
) -> None:
    """Bundles that share a store, a `cp -al` snapshot: to append would write into all of them."""
    shared, alone = "data/files/notes/- *[w]? '$ ü.bin", "data/files/notes/alone.bin"
    read_only = "data/files/notes/read-only.bin"
    there, new = tmp_path / "there", tmp_path / "new"
    make_bundle(
        there, big=False, files={path: path.encode() * 1000 for path in (shared, alone, read_only)}
    )
    snapshot = tmp_path / "snapshot"
    shutil.copytree(there, snapshot, copy_function=os.link)
    make_bundle(new, big=False, files=dict.fromkeys((shared, alone, read_only), b"more" * 20_000))
    for folder, at in (
        (snapshot, 1_500_000_000),
        (new, 1_600_000_000),
    ):  # rsync compares whole seconds
        for file in folder.rglob("*"):
            os.utime(file, (at, at))
    for path in (alone, read_only):
        shutil.copy(there / path, tmp_path / "x")
        (tmp_path / "x").rename(there / path)
    (there / read_only).chmod(0o444)
    inodes = {path: (there / path).stat().st_ino for path in (shared, alone, read_only)}
    before = verify(snapshot).bundle_id
    done = push(sshd, new, there) if by_ssh else push_here(new, there)
    assert done.returncode == 0, done.stderr
    assert verify(snapshot).ok and verify(snapshot).bundle_id == before
    assert verify(there).ok and verify(there).bundle_id == verify(new).bundle_id
    assert [path for path in inodes if (there / path).stat().st_ino == inodes[path]] == [alone]


@obeys("stage/carry/push.py", "Give it a folder of its own: {}")
def test_another_bundle_there_is_refused_with_a_folder_to_take(
    bundle: Path, tmp_path: Path
) -> None:
    there, other = tmp_path / "there", tmp_path / "laptop" / "other"
    make_bundle(other, big=False, name="other = 2")
    assert push_here(bundle, there).returncode == 0
    done = push_here(other, there, "--delete")
    assert done.returncode == 2 and "another bundle is there: `made`" in done.stderr, done.stderr
    assert verify(there).ok and verify(there).bundle_id == verify(bundle).bundle_id
    (line,) = [
        line for line in done.stderr.splitlines() if "-> Give it a folder of its own" in line
    ]
    beside = shlex.split(line.partition("stage push ")[2].partition("   (")[0])[1]
    assert push_here(other, Path(beside)).returncode == 0 and verify(Path(beside)).ok
    (there / TAGS).unlink()
    assert push_here(other, there).returncode == 2
    remove = in_it(done.stderr, r"(?<=remove it there: ).*(?=\))")
    subprocess.run(remove, shell=True, check=True, timeout=60)
    assert push_here(other, there).returncode == 0 and verify(there).ok


def test_a_damaged_or_unfinished_bundle_is_not_pushed(bundle: Path, tmp_path: Path) -> None:
    command = (sys.executable, "-m", "stage", "push", bundle, tmp_path / "there")
    (bundle / CONFIG).write_bytes(b"{")
    assert subprocess.run(command, capture_output=True, timeout=60).returncode == 1
    (bundle / TAGS).unlink()
    assert subprocess.run(command, capture_output=True, timeout=60).returncode == 2
    assert not (tmp_path / "there").exists()


def test_damage_here_does_not_replace_what_is_sound_there(bundle: Path, tmp_path: Path) -> None:
    """A bit flipped here, under another time: rsync would take it for the newer file."""
    there = tmp_path / "there"
    assert push_here(bundle, there).returncode == 0
    before, id = (there / WEIGHTS).read_bytes(), verify(bundle).bundle_id
    flip(bundle / WEIGHTS, 30_000)
    later = (bundle / WEIGHTS).stat().st_mtime + 10  # rsync compares whole seconds
    os.utime(bundle / WEIGHTS, (later, later))
    done = push_here(bundle, there)
    assert done.returncode == 1 and f"damaged here: {WEIGHTS}" in done.stderr, done.stderr
    assert "Nothing was sent" in done.stderr and "stage fetch MANIFEST -o" in done.stderr
    assert (there / WEIGHTS).read_bytes() == before
    assert verify(there).ok and verify(there).bundle_id == id
    flip(bundle / WEIGHTS, 30_000)
    done = push_here(bundle, there)
    assert done.returncode == 0 and verify(there).ok, done.stderr


@pytest.mark.parametrize("written", [[], ["4194305"]], ids=["nothing", "half"])
def test_a_lock_that_is_not_written_yet_ends_no_process(
    written: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A signal to process 0 would end this process and its whole group."""
    signalled = list[tuple[int, int]]()
    monkeypatch.setattr(os, "kill", lambda *words: signalled.append(words))
    _wait_for_or_end(written, PushTarget(None, "bundle"))
    assert not signalled and "bundle: another command sends there" in capsys.readouterr().err
