"""`kill`, the end of a job, a closed terminal: one message; no child or partial file remains."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stage.bundle.verify import verify
from stage.processes import Ended, ending_signals

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
