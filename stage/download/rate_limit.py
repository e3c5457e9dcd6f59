"""A limit on bytes per second, over all connections together, for links that others share."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable

from stage.errors import UsageError

_UNITS = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
}


def parse_rate(text: str) -> float:
    """Bytes per second of `20MB/s`, `500 kB/s` or `1.5MiB`.

    Raises:
        UsageError: the text is not a rate, or the rate is zero.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)(?:/s)?\s*", text)
    factor = _UNITS.get(match[2].lower()) if match else None
    if match is None or factor is None or float(match[1]) * factor < 1:
        raise UsageError(
            f"--max-rate {text}: this is not a rate.",
            "Write bytes per second with a unit: 20MB/s, 500kB/s, 1.5MiB/s.",
        )
    return float(match[1]) * factor


class RateLimit:
    """Computes waits that keep all receivers together below a rate. Idle time is not saved up.

    Args:
        rate: bytes per second; None: no limit.
        clock: seconds, monotonic.
    """

    def __init__(self, rate: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate, self._clock = rate, clock
        self._lock = threading.Lock()
        self._free_at = clock()

    def chunk(self, largest: int) -> int:
        """How many bytes to receive at a time: few at a slow rate, so that it stays even."""
        return largest if self._rate is None else max(1024, min(largest, int(self._rate / 10)))

    def delay(self, count: int) -> float:
        """Seconds to wait after `count` bytes came."""
        if self._rate is None:
            return 0.0
        with self._lock:
            now = self._clock()
            self._free_at = max(now, self._free_at) + count / self._rate
            return self._free_at - now
