"""The most memory of this rank in each phase of a run: load, train, evaluate.

Of a GPU, torch counts what is allocated and begins anew when it is asked to. Of the host, Linux
keeps the high water mark of a process and begins anew when 5 is written to /proc/self/clear_refs
(proc(5)). Where that is refused (some containers), the mark counts if a phase moved it; otherwise
the phase is what was seen at each look.
"""

from __future__ import annotations

from pathlib import Path

import torch

_PROC = Path("/proc/self")


class PhaseMemory:
    """The high water marks of one phase after another; the first begins with the process.

    Args:
        device: of this rank.
        proc: where Linux tells of this process.
    """

    def __init__(self, device: torch.device, proc: Path = _PROC) -> None:
        self._device, self._proc = device, proc
        self._before, self._seen = 0, 0

    def look(self) -> None:
        """Notes what is used now, where only looking helps."""
        if self._before:
            self._seen = max(self._seen, self._read("VmRSS"))

    def end(self) -> dict[str, float]:
        """Ends a phase and begins the next.

        Returns:
            `host` and, on a GPU, `device` -> the most in GiB.
        """
        self.look()
        mark = self._read("VmHWM")
        found = {"host": (mark if mark > self._before else self._seen) / 2**20}
        if self._device.type == "cuda":
            found["device"] = torch.cuda.max_memory_allocated(self._device) / 2**30
            torch.cuda.reset_peak_memory_stats(self._device)
        try:
            (self._proc / "clear_refs").write_text("5")
            self._before = 0
        except OSError:
            self._before, self._seen = mark, self._read("VmRSS")
        return found

    def _read(self, name: str) -> int:
        """A line of `status`, in KiB."""
        for line in (self._proc / "status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1])
        return 0
