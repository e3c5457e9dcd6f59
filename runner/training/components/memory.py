"""The most memory of this rank in each phase of a run: load, train, evaluate.

Of a GPU, torch counts what is allocated and begins anew when it is asked to. Of the host, Linux
keeps the high water mark of a process and begins anew when 5 is written to /proc/self/clear_refs
(proc(5)). Where that is refused (some containers), the mark is the most since the start.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import torch

_PROC = Path("/proc/self")


class PhaseMemory:
    """The high water marks of one phase after another; the first begins with the process.

    Args:
        device: of this rank.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def end(self) -> dict[str, float]:
        """Ends a phase and begins the next.

        Returns:
            `host` and, on a GPU, `device` -> the most in GiB.
        """
        lines = (_PROC / "status").read_text().splitlines()
        marks = [int(line.split()[1]) for line in lines if line.startswith("VmHWM:")]
        found = {"host": sum(marks) / 2**20}
        if self._device.type == "cuda":
            found["device"] = torch.cuda.max_memory_allocated(self._device) / 2**30
            torch.cuda.reset_peak_memory_stats(self._device)
        with suppress(OSError):
            (_PROC / "clear_refs").write_text("5")
        return found
