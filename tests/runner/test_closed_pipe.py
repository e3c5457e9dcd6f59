"""Training goes on where nobody reads what it prints: `runner train ... | head`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FULL = """
import sys
from runner.processes import outlive_readers
outlive_readers()
print("lost", flush=True)
"""


RANK = """
import pathlib, sys
from runner.processes import outlive_readers
from runner.training.reporting import open_console
outlive_readers()
print("before", flush=True)
log = pathlib.Path(sys.argv[1])
with open_console(log) as console:
    for step in range(3):
        console.say(f"step {step}")
    print("of a library", file=sys.stderr)
print("after")
sys.stderr.write("after")
"""


def test_a_reader_that_leaves_in_the_middle_is_noted_once(tmp_path: Path) -> None:
    script = RANK.replace('print("before", flush=True)', "").replace(
        "console.say(", "input() if step == 1 else 0; console.say("
    )
    log = tmp_path / "rank-0.log"
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(log)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None and process.stdout is not None
    assert process.stdout.readline() == b"step 0\n"
    process.stdout.close()
    process.stdin.write(b"\n")
    process.stdin.close()
    assert process.wait(timeout=60) == 0
    lines = log.read_text().splitlines()
    assert [line for line in lines if line.startswith("step")] == ["step 0", "step 1", "step 2"]
    assert sum("nobody reads stdout any more" in line for line in lines) == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_stays_an_error() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", FULL], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode != 0 and "No space left" in done.stderr
