"""An interrupted verification resumes where it stopped, and reads touched files again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from stage.bundle.report import VerificationReport
from stage.bundle.resume import EXPIRES_S, VerifyCheckpoint
from stage.bundle.stamp import UNSURE_NS
from stage.bundle.verify import verify
from tests.stage.bundles import BIG, BIG_SIZE, make_bundle


@pytest.fixture(scope="module")
def old_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle that nobody touched for long enough that its clocks tell."""
    root = make_bundle(tmp_path_factory.mktemp("old") / "bundle").root
    time.sleep(UNSURE_NS / 10**9 + 0.1)
    return root


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def journal(tmp_path: Path, notes: list[str]) -> Callable[..., VerifyCheckpoint]:
    def make(root: Path, **options: object) -> VerifyCheckpoint:
        return VerifyCheckpoint(
            tmp_path / "state", root, notes.append, **{"after_s": 0.0, **options}
        )  # type: ignore[arg-type]

    return make


class Interrupted(Exception):
    """Stands for Ctrl-C."""


def interrupt(root: Path, journal: VerifyCheckpoint, **options: object) -> int:
    """Verifies until the first batch, the large file, was read; returns the bytes read by then."""
    read: list[int] = []

    def progress(count: int) -> None:
        read.append(count)
        if sum(read) > BIG_SIZE:
            raise Interrupted

    with pytest.raises(Interrupted):
        verify(root, jobs=1, journal=journal, progress=progress, **options)  # type: ignore[arg-type]
    return sum(read[:-1])


def go_on(
    root: Path, journal: VerifyCheckpoint, **options: object
) -> tuple[VerificationReport, int]:
    read: list[int] = []
    return verify(root, journal=journal, progress=read.append, **options), sum(read)  # type: ignore[arg-type]


def test_it_goes_on_where_it_stopped_and_says_so(
    old_bundle: Path, journal: Callable[..., VerifyCheckpoint], notes: list[str], tmp_path: Path
) -> None:
    before = interrupt(old_bundle, journal(old_bundle))
    report, read = go_on(old_bundle, journal(old_bundle))
    assert report.ok and report.stamp == verify(old_bundle).stamp is not None
    assert before == BIG_SIZE and read == report.size - before
    assert len(notes) == 1 and notes[0].startswith("resumed: ") and "--no-resume" in notes[0]
    assert list((tmp_path / "state").iterdir()) == [], (
        "a verification that ended is never answered from memory"
    )
    assert go_on(old_bundle, journal(old_bundle))[1] == report.size


def test_killed_it_goes_on_by_the_command(old_bundle: Path, tmp_path: Path) -> None:
    """SIGKILL, as at the end of a job's time; its children end by themselves."""
    script = f"""
import os, signal
from pathlib import Path
from stage.bundle.resume import VerifyCheckpoint as Journal
from stage.bundle.verify import verify
class Killed(Journal):
    def add(self, batch):
        super().add(batch)
        os.kill(os.getpid(), signal.SIGKILL)
root = Path({str(old_bundle)!r})
journal = Killed(Path({str(tmp_path)!r}) / "airlift/verify", root, print, after_s=0)
verify(root, jobs=2, journal=journal)
"""
    killed = subprocess.run([sys.executable, "-c", script], timeout=60, stdout=subprocess.DEVNULL)
    assert killed.returncode == -signal.SIGKILL
    command = [sys.executable, "-m", "stage", "verify", str(old_bundle)]
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path)}
    first = subprocess.run(command, env=environment, capture_output=True, text=True)
    again = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert first.returncode == again.returncode == 0 and first.stdout == again.stdout
    assert first.stderr.startswith("resumed: ") and again.stderr == ""


def test_anew_when_told_so(
    old_bundle: Path, journal: Callable[..., VerifyCheckpoint], notes: list[str]
) -> None:
    interrupt(old_bundle, journal(old_bundle))
    report, read = go_on(old_bundle, journal(old_bundle, resume=False))
    assert read == report.size and notes == []


TICK_S = 0.1  # no clock of a file system that tests run on is as coarse


@pytest.fixture
def copy(old_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy to damage, where a change is told from another after `TICK_S`, not two seconds."""
    monkeypatch.setattr("stage.bundle.stamp.UNSURE_NS", int(TICK_S * 10**9))
    root = tmp_path / "bundle"
    subprocess.run(["cp", "-a", "--sparse=always", old_bundle, root], check=True)
    time.sleep(1.5 * TICK_S)
    return root


@pytest.mark.parametrize("change", ["in place", "times set back", "another in its place"])
def test_damage_after_the_first_reading_is_found(
    copy: Path, journal: Callable[..., VerifyCheckpoint], change: str, notes: list[str]
) -> None:
    """With the size, and the mtime where a tool sets that back, as before."""
    assert interrupt(copy, journal(copy)) == BIG_SIZE
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
    report, _ = go_on(copy, journal(copy))
    assert [finding.path for finding in report.findings] == [BIG] and report.stamp is None


def test_damage_is_never_remembered(copy: Path, journal: Callable[..., VerifyCheckpoint]) -> None:
    with open(copy / BIG, "r+b") as file:
        file.seek(BIG_SIZE - 1)
        file.write(b"x")
    time.sleep(1.5 * TICK_S)
    assert interrupt(copy, journal(copy)) == BIG_SIZE
    report, read = go_on(copy, journal(copy))
    assert [finding.path for finding in report.findings] == [BIG] and read == report.size


def test_what_was_written_just_before_is_not_remembered(
    tmp_path: Path, journal: Callable[..., VerifyCheckpoint]
) -> None:
    """A change in the same tick of the file system's clock could not be told."""
    root = make_bundle(tmp_path / "bundle").root
    interrupt(root, journal(root))
    report, read = go_on(root, journal(root))
    assert report.ok and read == report.size


SPOILED = ["expired", "from the future", "torn", "no journal", "another digest", "another bundle"]


@pytest.mark.parametrize("spoil", SPOILED)
def test_a_journal_that_cannot_be_believed_is_not(
    old_bundle: Path,
    journal: Callable[..., VerifyCheckpoint],
    tmp_path: Path,
    spoil: str,
    notes: list[str],
) -> None:
    interrupt(old_bundle, journal(old_bundle))
    (path,) = (tmp_path / "state").iterdir()
    lines = path.read_text().splitlines()
    at = lines[0].partition(",")[0]
    texts = {
        "expired": [line.replace(at, f"[{time.time() - EXPIRES_S - 60}") for line in lines],
        "from the future": [line.replace(at, f"[{time.time() + 9999}") for line in lines],
        "torn": [line[:-9] for line in lines],
        "no journal": ["{}", "[1, 2", '"', '[1e999, [], 0, "", [0]]', "\x00"],
        "another digest": [line.replace('", [', '0", [') for line in lines],
        "another bundle": [line.replace("data/", "data/other/") for line in lines],
    }
    path.write_text("\n".join(texts[spoil]))
    report, read = go_on(old_bundle, journal(old_bundle))
    assert report.ok and read == report.size and notes == []


def test_where_nothing_can_be_kept_that_is_said_and_no_obstacle(
    old_bundle: Path, journal: Callable[..., VerifyCheckpoint], tmp_path: Path, notes: list[str]
) -> None:
    (tmp_path / "state").write_text("a file where a folder should be")
    report, read = go_on(old_bundle, journal(old_bundle))
    assert report.ok and read == report.size
    assert len(notes) == 1 and "if this is interrupted, the next one starts again" in notes[0]
