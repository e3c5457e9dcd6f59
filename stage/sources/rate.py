"""A limit on bytes a second, over all connections together: for links that are shared with others."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable

from stage.errors import UsageError

_UNITS = {
    unit.lower(): factor
    for unit, factor in {
        "B": 1,
        "kB": 10**3,
        "MB": 10**6,
        "GB": 10**9,
        "KiB": 2**10,
        "MiB": 2**20,
        "GiB": 2**30,
    }.items()
}


def parse_rate(text: str) -> float:
    """Bytes a second of `20MB/s`, `500 kB/s` or `1.5MiB`.

    Raises:
        UsageError: it is none, or zero.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)(?:/s)?\s*", text)
    factor = _UNITS.get(match[2].lower()) if match else None
    if match is None or factor is None or float(match[1]) * factor < 1:
        raise UsageError(
            f"--max-rate {text}: is no rate.", "Write bytes a second with a unit: 20MB/s, 500kB/s, 1.5MiB/s."
        )
    return float(match[1]) * factor


class RateLimit:
    """Makes whoever receives bytes wait, so that all together stay below a rate. Idle time is not saved up.

    Args:
        rate: bytes a second; None: no limit.
        clock: seconds, monotonic.
    """

    def __init__(self, rate: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate, self._clock = rate, clock
        self._lock = threading.Lock()
        self._free_at = clock()

    def chunk(self, largest: int) -> int:
        """How many bytes to take at a time, so that a slow rate does not come in gusts."""
        return largest if self._rate is None else max(1024, min(largest, int(self._rate / 10)))

    def delay(self, count: int) -> float:
        """Seconds to wait after `count` bytes came."""
        if self._rate is None:
            return 0.0
        with self._lock:
            now = self._clock()
            self._free_at = max(now, self._free_at) + count / self._rate
            return self._free_at - now
