"""What is read ahead is believed only where a lock says the same: no finding differs, and no manifest leads astray."""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest

from stage import bundle as layout
from stage.bundle import Bundle
from stage.errors import IncompleteError
from stage.findings import VerificationReport
from stage.headstart import LEAST, MOST, SMALL, HeadStart, Sound
from stage.stamp import stamp_of
from stage.verify import verify
from tests.stage.bundles import contents, make_bundle, many
from tests.stage.damages import DAMAGES, NEED_BLOCKS, Damage

LARGE = "data/models/bert/model.safetensors"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return make_bundle(tmp_path_factory.mktemp("sound") / "bundle", big=False)


@pytest.fixture
def copy(sound: Bundle, tmp_path: Path) -> Path:
    root = tmp_path / "bundle"
    subprocess.run(["cp", "-a", sound.root, root], check=True)
    return root


def read_ahead(root: Path, bundle: Bundle, manifest: bytes | None = None) -> Sound:
    """What holds of a bundle's lines, or of a manifest that somebody else wrote."""
    if manifest is not None:
        (root / layout.MANIFEST).write_bytes(manifest)
    with HeadStart(root, 2, least=0) as ahead:
        ahead.wait()
        return ahead.sound(manifest or layout.payload_manifest(bundle.lock), bundle.lock.files)


def verified(root: Path) -> VerificationReport:
    with HeadStart(root, 2, least=0) as ahead:
        return verify(root, jobs=2, ahead=ahead)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("damage", [d for d in DAMAGES if d not in NEED_BLOCKS], ids=lambda d: d.__name__)
def test_a_head_start_changes_no_word(copy: Path, damage: Damage, seed: int) -> None:
    damage(copy, random.Random(f"{damage.__name__} {seed}"))
    report = verified(copy)
    assert not report.ok and report == verify(copy, jobs=2)


def test_all_that_is_small_and_sound_is_read_once(sound: Bundle) -> None:
    found = read_ahead(sound.root, sound)
    assert found.astray == {LARGE} and (sound.root / LARGE).stat().st_size > SMALL
    read = [file.path for file in sound.lock.files if file.path != LARGE]
    assert found.stamp == stamp_of((sound.root / path).stat() for path in read)
    counts: list[int] = []
    with HeadStart(sound.root, 2, least=0) as ahead:
        report = verify(sound.root, jobs=2, ahead=ahead, progress=counts.append)
    assert report.ok and sum(counts) == report.size


def other_bytes(root: Path, path: str) -> None:
    (root / path).write_bytes((root / path).read_bytes()[:-1] + b"?")


def longer(root: Path, path: str) -> None:
    with open(root / path, "ab") as file:
        file.write(b"?")


def gone(root: Path, path: str) -> None:
    (root / path).unlink()


def a_pipe(root: Path, path: str) -> None:
    gone(root, path)
    os.mkfifo(root / path)


def a_link(root: Path, path: str) -> None:
    """To the very bytes: a bundle has no links."""
    (root / path).rename(root / "elsewhere")
    (root / path).symlink_to(root / "elsewhere")


def a_linked_folder(root: Path, path: str) -> None:
    (root / path).parent.rename(root / "elsewhere")
    (root / path).parent.symlink_to(root / "elsewhere")


@pytest.mark.parametrize("change", [other_bytes, longer, gone, a_pipe, a_link, a_linked_folder])
def test_what_is_not_there_as_it_should_be_is_astray(
    copy: Path, sound: Bundle, change: Callable[[Path, str], None]
) -> None:
    path = "data/models/bert/1_Pooling/config.json"
    change(copy, path)
    assert read_ahead(copy, sound).astray == {LARGE, path}


STRAYS = ["data/../outside", "data/models/../../outside", "/etc/hostname", "bagit.txt", "data//x", "data/./x"]
STRAYS += ["data/\0", ""]


@pytest.mark.parametrize("path", STRAYS)
def test_no_line_leads_out_of_the_payload(copy: Path, path: str) -> None:
    """Though the bytes there are the ones it speaks of."""
    (copy / "data/x").write_bytes(b"secret")
    (copy / "outside").write_bytes(b"secret")
    there = b"secret" if "\0" in path or not path else Path(copy, path).read_bytes()
    (copy / layout.MANIFEST).write_bytes(f"{sha256(there).hexdigest()}  {path}\n".encode())
    with HeadStart(copy, 2, least=0) as ahead:
        ahead.wait()
        (said,) = ahead._said
    assert said.astray == [0] and said.stamp.files == 0


@pytest.mark.parametrize("noise", [b"\n" * 40_000, b"\n", b"no end", b"\xff" * 200 + b"\n", b"x" * 70_000 + b"\n"])
def test_no_manifest_is_too_odd_to_be_told_as_damage(copy: Path, noise: bytes) -> None:
    with open(copy / layout.MANIFEST, "ab") as file:
        file.write(noise)
    report = verified(copy)
    assert report == verify(copy, jobs=2)
    assert {finding.path for finding in report.findings} == {layout.MANIFEST}


def test_a_size_that_the_lock_gets_wrong_is_not_sound(sound: Bundle) -> None:
    """A manifest has none, so a head start cannot see that; whoever believes it must."""
    right = sound.lock.files
    wrong = [*right[:-1], type(right[-1])(**{**vars(right[-1]), "size": right[-1].size + 1})]
    with HeadStart(sound.root, 2, least=0) as ahead:
        ahead.wait()
        found = ahead.sound(layout.payload_manifest(sound.lock), wrong)
    assert right[-1].path in found.astray


def test_of_another_manifest_than_the_locks_nothing_is_known(sound: Bundle) -> None:
    with HeadStart(sound.root, 2, least=0) as ahead:
        ahead.wait()
        assert ahead.sound(None, sound.lock.files).astray == {file.path for file in sound.lock.files}


@pytest.mark.parametrize("case", ["one process", "few files", "very many", "a pipe for a manifest", "nothing there"])
def test_where_it_would_not_pay_there_is_none(copy: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    manifest, jobs = copy / layout.MANIFEST, 2
    text = manifest.read_bytes()
    manifest.write_bytes(text * (LEAST // len(text) + 1))
    if case == "one process":
        jobs = 1
    elif case == "few files":
        manifest.write_bytes(text)
    elif case == "very many":
        manifest.write_bytes(text * (MOST // len(text) + 1))
    else:
        manifest.unlink()
        if case == "a pipe for a manifest":
            os.mkfifo(manifest)
    monkeypatch.setattr(os, "fork", None)
    with HeadStart(copy, jobs) as ahead:
        ahead.wait()
        assert ahead.leaves({"data/a": (1, "x")}) == {"data/a": (1, "x")}


def test_a_process_that_is_ended_from_outside_is_no_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = make_bundle(tmp_path / "bundle", big=False, files={**contents(), **many(1500)}).root
    owner, read = os.getpid(), HeadStart._read

    def killed(self: HeadStart, number: int, send: Callable[[list[object]], None]) -> None:
        if os.getpid() != owner:
            os.kill(os.getpid(), 9)
        read(self, number, send)

    monkeypatch.setattr(HeadStart, "_read", killed)
    with HeadStart(root, 2) as ahead:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)  # it has taken a piece and died
        with pytest.raises(IncompleteError, match="ended before its work was done"):
            verify(root, jobs=2, ahead=ahead)
