"""What a command's run lists to be pulled, and which names a laptop takes."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest

from runner.remote import listing
from runner.remote.listing import is_name, list_results, read_listing
from runner.run_folder.layout import RunFolder
from runner.run_folder.project import list_project, pack, unpack
from tests.support.commands import write_project

ZEROS = "0" * 64


@pytest.fixture
def ran(tmp_path: Path) -> Path:
    """The run folder of a command that has written something."""
    project = write_project(tmp_path / "project")
    folder = RunFolder(tmp_path / "output/mine")
    folder.logs.mkdir(parents=True)
    pack(list_project(project, (), ()), folder.project, folder.packed)
    unpack(folder.project, folder.packed, folder.work)
    folder.config.write_text("command: python train.py\nresults: []\n")
    (folder.logs / "slurm-1.out").write_text("a log")
    names = ("out/model.bin", "out/checkpoint-3/model.bin", "out/sample 1.png", "結果/表.csv")
    for name in (*names, "best-epoch=3.ckpt", ".hydra/config.yaml", "step_100.png", "large.bin"):
        path = folder.work / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return folder.root


def listed(root: Path, *patterns: str, every: bool = False) -> listing.Listing:
    return read_listing("\n".join(list_results(root, patterns, every=every)))


def test_what_a_command_wrote_is_listed_and_checkpoints_stay_until_they_are_asked_for(
    ran: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listing, "LARGE", 20)
    (ran / "work/large.bin").write_bytes(bytes(21))
    found = listed(ran)
    beside = {"config.yaml", "logs/slurm-1.out"}
    plain = {"work/out/model.bin", "work/out/sample 1.png", "work/結果/表.csv", "work/step_100.png",
             "work/.hydra/config.yaml"}  # fmt: skip
    stays = {"work/out/checkpoint-3/model.bin", "work/best-epoch=3.ckpt", "work/large.bin"}
    assert found.results.keys() == beside | plain
    assert found.left.keys() == stays
    assert found.refused == [] and found.left["work/large.bin"] == 21
    one = found.results["work/out/sample 1.png"]
    assert one.sha256 == hashlib.sha256(b"out/sample 1.png").hexdigest() and one.size == 16
    assert listed(ran, every=True).results.keys() == beside | plain | stays
    for pattern in ("work/out/checkpoint-3/", "out/checkpoint-3", "out/checkpoint-*/*"):
        asked = listed(ran, pattern).results.keys()
        assert asked == beside | {"work/out/checkpoint-3/model.bin"}, pattern
    (ran / "config.yaml").write_text("command: x\nresults: [out/**]\n")
    narrowed = listed(ran)
    assert narrowed.results.keys() == beside | {"work/out/model.bin", "work/out/sample 1.png"}


def test_names_that_cannot_come_are_named(ran: Path) -> None:
    (ran / "work/two\nlines").touch()
    (ran / "work/.git").mkdir()
    (ran / "work/.git/config").touch()
    os.mkfifo(ran / "work/pipe")
    (ran / "work/link").symlink_to("/etc/passwd")
    found = listed(ran)
    assert sorted(name for name, _ in found.refused) == ["work/.git/config", r"work/two\nlines"]
    assert not {"work/pipe", "work/link"} & {*found.results}


@pytest.mark.parametrize(
    "name",
    [
        "work/../../.bashrc", "work/..", "work/a/../b", "work//a", "/etc/passwd", "work", "work/",
        "work/.git/hooks/post-checkout", "work/.GIT/config", "work/sub/.gitmodules", "work/./a",
        "work/a\\..\\b", "work/.g\u200cit/config", "work/a\x1b[2J", "work/\u202egnp.exe",
        "work/a\ufffd", "work/" + "a" * 256, "a=1/../work/x", "workx/a", "logs/../x.log",
        "logs/.out", "work/" + "/".join("a" * 31), "work/.../x", "work/.", "work/. /x",
    ],
)  # fmt: skip
def test_a_far_end_cannot_name_what_lies_elsewhere(name: str) -> None:
    assert not is_name(name)
    found = read_listing(f"1 {ZEROS} {name}\n- left:5 {name}")
    assert (found.results, found.left) == ({}, {})
    assert found.refused


def test_two_names_of_one_file_on_a_disk_of_macos_are_refused() -> None:
    names = ("work/\u00e9", "work/e\u0301", "work/A", "work/a", "work/b", "work/b/c")
    found = read_listing("\n".join(f"1 {ZEROS} {name}" for name in names))
    assert [*found.results] == ["work/\u00e9", "work/A", "work/b"]
    assert [why for _, why in found.refused] == ["is listed twice"] * 3


def test_what_is_still_written_is_listed_with_the_bytes_that_are_hashed(ran: Path) -> None:
    lines = [*list_results(ran, (), every=False)]
    (size, digest), path = lines[0].split()[:2], ran / "config.yaml"
    path.write_text(path.read_text() + "more: of it\n")
    start = path.read_bytes()[: int(size)]
    assert hashlib.sha256(start).hexdigest() == digest
    assert json.loads((ran / "project.json").read_text())["format"] == 1
