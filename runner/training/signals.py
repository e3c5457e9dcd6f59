"""Slurm's and the user's wish to stop, noted and acted on at the next step boundary.

Saving inside a signal handler fails half the time; one rank leaving alone hangs the others. So the handler only notes,
and the loop asks all ranks together.
"""

from __future__ import annotations

import signal
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopRequest:
    """Remembers the first stop signal that came."""

    def __init__(self) -> None:
        self.received: str | None = None

    def listen(self) -> None:
        """From now on stop signals are noted instead of ending the process."""
        for number in STOP_SIGNALS:
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or signal.Signals(number).name
