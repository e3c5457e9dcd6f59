"""The most memory of each phase: real pages of a process, and a container without new marks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from runner.training.components.memory import PhaseMemory

MIB = 2**20
# The peak of one phase must not count in the next one.
PROGRAM = """
import torch
from runner.training.components.memory import PhaseMemory
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


def test_where_no_new_mark_is_allowed_what_was_seen_counts(tmp_path: Path) -> None:
    import torch

    def uses(now: int, most: int) -> None:
        lines = f"Name:\tx\nVmHWM:\t{most * 1024} kB\nVmRSS:\t{now * 1024} kB\n"
        (tmp_path / "status").write_text(lines)

    (tmp_path / "clear_refs").mkdir()  # cannot be written
    uses(100, 200)
    memory = PhaseMemory(torch.device("cpu"), tmp_path)
    assert memory.end() == {"host": pytest.approx(200 / 1024)}
    uses(150, 200)
    memory.look()
    uses(120, 200)
    assert memory.end()["host"] == pytest.approx(150 / 1024), "the mark did not move"
    uses(130, 300)
    assert memory.end()["host"] == pytest.approx(300 / 1024), "the mark moved"
