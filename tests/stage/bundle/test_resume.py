"""An interrupted verification resumes where it stopped, and reads touched files again."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from stage.bundle import verifier
from stage.bundle.bundle import verify
from stage.bundle.verifier import EXPIRES_S, UNSURE_NS, VerificationReport
from tests.stage.bundles import BIG, BIG_SIZE, make_bundle
from tests.support.waiting import wait_for


@pytest.fixture(scope="module")
def old_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle that nobody touched for long enough that its clocks tell."""
    root = make_bundle(tmp_path_factory.mktemp("old") / "bundle").root
    time.sleep(UNSURE_NS / 10**9 + 0.1)
    return root


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def notes() -> list[str]:
    return []


class Interrupted(Exception):
    """Stands for Ctrl-C."""


def interrupt(root: Path, state: Path, files: int = 1, **options: Any) -> None:
    """Verifies until this many files were read, the largest first."""
    keep, read = verifier.Journal.keep, []

    def keep_some(journal: verifier.Journal, path: str, *facts: Any) -> None:
        keep(journal, path, *facts)
        read.append(path)
        if len(read) == files:
            raise Interrupted

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(verifier.Journal, "keep", keep_some)
        verify(root, jobs=1, state=state, **options)


def go_on(root: Path, state: Path, **options: Any) -> tuple[VerificationReport, int]:
    read: list[int] = []
    return verify(root, state=state, progress=read.append, **options), sum(read)


def journal_of(state: Path) -> Path:
    (path,) = (state / "verify").iterdir()
    return path


def test_anew_when_told_so(old_bundle: Path, state: Path, notes: list[str]) -> None:
    interrupt(old_bundle, state)
    report, read = go_on(old_bundle, state, note=notes.append, resume=False)
    assert read == report.size and notes == []


TICK_S = 0.1  # no clock of a file system that tests run on is as coarse


@pytest.fixture
def copy(old_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy to damage, where a change is told from another after `TICK_S`, not two seconds."""
    monkeypatch.setattr(verifier, "UNSURE_NS", int(TICK_S * 10**9))
    root = tmp_path / "bundle"
    subprocess.run(["cp", "-a", "--sparse=always", old_bundle, root], check=True)
    time.sleep(1.5 * TICK_S)
    return root


@pytest.mark.parametrize("change", ["in place", "times set back", "another in its place"])
def test_damage_after_the_first_reading_is_found(copy: Path, state: Path, change: str) -> None:
    """With the size, and the mtime where a tool sets that back, as before."""
    interrupt(copy, state)
    before = (copy / BIG).stat()
    if change == "another in its place":
        subprocess.run(
            ["cp", "-a", "--sparse=always", copy / BIG, copy.parent / "other"], check=True
        )
        (copy.parent / "other").replace(copy / BIG)
    with open(copy / BIG, "r+b") as file:
        file.write(b"damaged")
    if change != "in place":
        os.utime(copy / BIG, ns=(before.st_atime_ns, before.st_mtime_ns))
    report, _ = go_on(copy, state)
    assert [finding.path for finding in report.findings] == [BIG] and report.stamp is None


def test_damage_is_never_remembered(copy: Path, state: Path) -> None:
    with open(copy / BIG, "r+b") as file:
        file.seek(BIG_SIZE - 1)
        file.write(b"x")
    time.sleep(1.5 * TICK_S)
    interrupt(copy, state)
    assert BIG.encode() not in journal_of(state).read_bytes()
    report, read = go_on(copy, state)
    assert [finding.path for finding in report.findings] == [BIG] and read >= BIG_SIZE


SPOILED = ["expired", "from the future", "torn", "no journal", "other facts", "another bundle"]


@pytest.mark.parametrize("spoil", SPOILED)
def test_a_journal_that_cannot_be_believed_is_not(
    old_bundle: Path, state: Path, spoil: str, notes: list[str]
) -> None:
    interrupt(old_bundle, state)
    text = journal_of(state).read_bytes()
    began = text.split(b"began ")[1].split(b"\n")[0]
    texts = {
        "expired": text.replace(began, b"%d" % (time.time() - EXPIRES_S - 60)),
        "from the future": text.replace(began, b"%d" % (time.time() + 9999)),
        "torn": text[:-9],
        "no journal": b"began x\n{}\n[1, 2\n\x00\xff\nbegan 1e999\ndata\n \n",
        "other facts": text.replace(b" %d " % BIG_SIZE, b" %d " % (BIG_SIZE + 1)),
        "another bundle": text.replace(b"data/", b"data/other/"),
    }
    journal_of(state).write_bytes(texts[spoil])
    report, read = go_on(old_bundle, state, note=notes.append)
    assert report.ok and read == report.size and notes == []


FILES = 2000
# Stands for larger files: each digest takes some time, asleep or at work.
SLOWER = """
import hashlib, os, sys, time
sha256, asleep, busy = hashlib.sha256, {asleep}, {busy}
def slower(*data):
    time.sleep(asleep)
    end = time.process_time() + busy
    while time.process_time() < end:
        pass
    return sha256(*data)
hashlib.sha256 = slower
"""
STAGE = "from stage.__main__ import main\nsys.argv[0] = 'stage'\nmain()\n"
ALONE = "import runpy\nsys.argv = sys.argv[1:]\nrunpy.run_path(sys.argv[0], run_name='__main__')\n"


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    files = {f"data/files/notes/{n:04d}.txt": f"note {n}\n".encode() for n in range(FILES)}
    root = make_bundle(tmp_path_factory.mktemp("many") / "bundle", big=False, files=files).root
    time.sleep(UNSURE_NS / 10**9 + 0.1)
    return root


def command(entrance: str, root: Path, asleep: float = 0, busy: float = 0) -> list[str]:
    program = SLOWER.format(asleep=asleep, busy=busy)
    if entrance == "stage verify":
        return [sys.executable, "-c", program + STAGE, "verify", str(root), "--jobs", "2"]
    script = str(root / "stage-verify.py")
    return [sys.executable, "-c", program + ALONE, script, str(root), "--jobs", "2"]


def lines_of(state: Path) -> list[bytes]:
    """The paths in the journal, in the order in which they were read."""
    lines = journal_of(state / "airlift").read_bytes().split(b"\n")[:-1]
    return [line.split(b" ")[0] for line in lines if line.startswith(b"data/")]


@pytest.mark.parametrize("entrance", ["stage verify", "stage-verify.py"])
def test_killed_ten_times_it_reads_no_file_twice_but_those_in_hand(
    many: Path, tmp_path: Path, entrance: str
) -> None:
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path)}
    for kill in range(1, 11):
        process = subprocess.Popen(
            command(entrance, many, asleep=0.0005), env=environment, stderr=subprocess.DEVNULL
        )
        enough = kill * FILES // 12
        wait_for(lambda: (tmp_path / "airlift/verify").is_dir())
        wait_for(lambda: bool(list((tmp_path / "airlift/verify").iterdir())))
        wait_for(lambda enough=enough: len(lines_of(tmp_path)) >= enough)  # type: ignore[misc]
        process.kill()
        assert process.wait() == -signal.SIGKILL
        before = -1
        while before != (before := len(lines_of(tmp_path))):  # its children notice, and end
            time.sleep(0.02)
    counts = Counter(lines_of(tmp_path))
    assert set(counts.values()) == {1} and FILES * 10 // 12 <= len(counts) < FILES
    done = subprocess.run(
        command(entrance, many), env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith(f"resumed: {len(counts)} of {FILES} files")


def test_a_file_that_may_change_while_it_is_read_is_not_remembered(
    copy: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Lustre a change in the same second has the same ctime: the reading may be long."""
    monkeypatch.setattr(verifier, "unsure_ns", lambda _root: UNSURE_NS)
    status = min(copy.rglob("*.txt")).stat()
    with verifier.Journal(state, copy, "seal", None) as journal:
        journal.keep("data/a", status, status.st_ctime_ns + UNSURE_NS // 2)
        assert not journal._lines()
        journal.keep("data/a", status, status.st_ctime_ns + 2 * UNSURE_NS)
        assert len(journal._lines()) == 1


def test_after_a_folder_was_renamed_every_file_below_it_is_read_again(
    copy: Path, state: Path
) -> None:
    """To rename a folder and back changes no `stat` of a file in it: the path alone tells."""
    interrupt(copy, state, files=9)
    (copy / "data/models").rename(copy / "data/aside")
    assert not verify(copy, state=state).ok
    (copy / "data/aside").rename(copy / "data/models")
    interrupt(copy, state, files=9)
    lines = journal_of(state).read_bytes()
    journal_of(state).write_bytes(lines.replace(b"data/models/", b"data/older/"))
    report, read = go_on(copy, state)
    below = sum(p.stat().st_size for p in (copy / "data/models").rglob("*") if p.is_file())
    assert report.ok and read == below


def test_ended_by_the_limit_of_cpu_time_it_says_so_and_goes_on(many: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path)}
    script = f"ulimit -t 2; exec {shlex.join(command('stage verify', many, busy=0.002))}"
    done = subprocess.run(
        ["bash", "-c", script], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 5 and "(ulimit -t) ended it" in done.stderr, done.stderr
    assert "\n  -> Run it again: it resumes." in done.stderr
    read = len(lines_of(tmp_path))
    assert len(set(lines_of(tmp_path))) == read > 100
    done = subprocess.run(
        command("stage verify", many), env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and done.stderr.startswith(f"resumed: {read} of {FILES} files")


def test_what_was_written_just_before_is_not_remembered(
    tmp_path: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change in the same tick of the file system's clock could not be told."""
    monkeypatch.setattr(verifier, "KERNELS_OWN", frozenset())
    root = make_bundle(tmp_path / "bundle", big=False).root
    interrupt(root, state, files=8)
    report, read = go_on(root, state)
    assert report.ok and read == report.size and report.stamp is None
