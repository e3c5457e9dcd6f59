"""The most memory of each phase: real pages of a process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

MIB = 2**20
# The peak of one phase must not count in the next one.
PROGRAM = """
import torch
from runner.training.reporting import PhaseMemory
memory = PhaseMemory(torch.device("cpu"))
first = memory.end()["host"]
block = torch.ones(300 * 2**20, dtype=torch.uint8)
del block
second = memory.end()["host"]
print(first, second, memory.end()["host"])
"""


def test_each_phase_has_a_mark_of_its_own() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first, second, third = (float(text) * 1024 for text in done.stdout.split())
    assert second > first + 250, "the block was held in the second phase"
    if (Path("/proc/self/clear_refs")).exists():
        assert third < second - 250
