"""`kill`, the end of a job, a closed terminal: one message; no child or partial file remains."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stage.bundle.verify import verify
from stage.processes import Ended, ending_signals
from tests.stage.bundles import BIG, make_bundle

# Signalled at the moment a file whose name has these words in it is opened for writing.
SIGNALLED = """
import os, sys
words, number = sys.argv.pop(1), int(sys.argv.pop(1))
def watch(event, arguments):
    if event == "open" and words in str(arguments[0]) and arguments[2] & (os.O_WRONLY | os.O_RDWR):
        os.kill(os.getpid(), number)
sys.addaudithook(watch)
from stage.cli import main
main()
"""


def signalled_at(
    words: str, number: int, folder: Path, *arguments: object
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", SIGNALLED, words, str(int(number)), *map(str, arguments)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)


def run(folder: Path, *arguments: object) -> None:
    command = [sys.executable, "-m", "stage", *map(str, arguments)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def told(done: subprocess.CompletedProcess[str], name: str) -> None:
    """One paragraph: the signal, the files that are kept, the command to run."""
    assert done.returncode == {"SIGTERM": 143, "SIGHUP": 129}[name], done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert f"Ended by {name}" in line and "kept" in line
    assert "Run the same command again" in done.stderr and "Traceback" not in done.stderr


def test_a_fetch_told_to_end_says_so_and_goes_on_when_run_again(tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw/a.txt").write_text("a\n")
    (tmp_path / "m.yaml").write_text("format: 1\nname: m\nassets:\n  r: {path: raw}\n")
    fetch = ("fetch", "m.yaml", "-o", "bundle")
    for name in ("SIGHUP", "SIGTERM"):
        # What the run before fetched would not be opened for writing again.
        shutil.rmtree(tmp_path / "bundle", ignore_errors=True)
        told(signalled_at("files/r/a.txt", signal.Signals[name], tmp_path, *fetch), name)
        assert not (tmp_path / "bundle/tagmanifest-sha256.txt").exists()
    run(tmp_path, *fetch)
    assert verify(tmp_path / "bundle").ok


def test_a_patch_and_an_apply_told_to_end_leave_nothing_half_written(tmp_path: Path) -> None:
    sound, copy = make_bundle(tmp_path / "sound", big=False).root, tmp_path / "copy"
    shutil.copytree(sound, copy)
    (copy / "data/models/bert/config.json").write_text("{")
    subprocess.run(
        [sys.executable, "-m", "stage", "verify", copy, "--report", tmp_path / "r.json"],
        check=False,
    )
    patch = ("patch", sound, "--report", "r.json", "-o", "mend")
    told(signalled_at("mend", signal.SIGTERM, tmp_path, *patch), "SIGTERM")
    assert {path.name for path in tmp_path.iterdir()} == {"sound", "copy", "r.json"}
    run(tmp_path, *patch)
    told(
        signalled_at("workshop.partial", signal.SIGTERM, tmp_path, "apply", copy, "mend"), "SIGTERM"
    )
    assert (copy / "data/models/bert/config.json").read_text() == "{"
    run(tmp_path, "apply", copy, "mend")
    assert verify(copy).ok


def processes_about(path: Path) -> list[str]:
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = file.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # it ended while we looked
            continue
        found += [command] * (str(path) in command)
    return found


def test_a_push_told_to_end_ends_its_rsync_and_keeps_what_came(tmp_path: Path) -> None:
    """To the process alone, as `kill` and Slurm send it: only we can end rsync."""
    bundle, there, slow = (
        make_bundle(tmp_path / "bundle").root,
        tmp_path / "there",
        tmp_path / "bin",
    )
    slow.mkdir()
    limit = '$(test "$1" = --version || echo --bwlimit=8m)'
    (slow / "rsync").write_text(f'#!/bin/sh\nexec {shutil.which("rsync")} "$@" {limit}\n')
    (slow / "rsync").chmod(0o755)
    pushing = subprocess.Popen(
        [sys.executable, "-m", "stage", "push", bundle, there],
        env={**os.environ, "PATH": f"{slow}:{os.environ['PATH']}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not ((there / BIG).exists() and (there / BIG).stat().st_size > 2_000_000):
        assert pushing.poll() is None
        time.sleep(0.01)
    for _ in range(2):  # as `timeout` does it: to the process, and to its group
        pushing.send_signal(signal.SIGTERM)
    out, err = pushing.communicate(timeout=120)
    told(subprocess.CompletedProcess([], pushing.returncode, out, err), "SIGTERM")
    for _ in range(200):
        if not processes_about(there):
            break
        time.sleep(0.01)
    assert processes_about(there) == []
    assert (there / BIG).stat().st_size > 2_000_000
    assert not (there / "tagmanifest-sha256.txt").exists()


def test_a_forked_reader_ends_without_a_word_of_its_own() -> None:
    """A signal to the group also reaches the workers of `verify`; the parent reports it."""
    forks = """
import os, signal
from stage.processes import ending_signals
with ending_signals():
    if (child := os.fork()) == 0:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except BaseException:
            os._exit(7)
    print(os.WTERMSIG(os.waitpid(child, 0)[1]))
"""
    done = subprocess.run([sys.executable, "-c", forks], capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.stderr) == (str(int(signal.SIGTERM)), "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_comes_in_a_callback_of_python_is_not_lost(number: int) -> None:
    """Python drops what is raised there: two of 107 Ctrl-C in `stage fetch` changed nothing."""

    class Signalled:
        def __del__(self) -> None:
            signal.raise_signal(number)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises((KeyboardInterrupt, Ended)), ending_signals():
            Signalled()
            for _ in range(500):
                time.sleep(0.01)
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_signal_that_nohup_ignores_stays_ignored(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a\n")
    (tmp_path / "m.yaml").write_text("format: 1\nname: m\nassets:\n  r: {path: a.txt}\n")
    command = [
        sys.executable,
        "-c",
        SIGNALLED,
        "files/r/a.txt",
        str(int(signal.SIGHUP)),
        "fetch",
        "m.yaml",
        "-o",
        "b",
    ]
    done = subprocess.run(
        ["nohup", *command], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
