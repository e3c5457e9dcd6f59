"""When to try again, and after how long: pure rules, shared by metadata calls and downloads."""

from __future__ import annotations

import email.utils
import random
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone

from stage.errors import IncompleteError
from stage.progress import Reporter

LONG_WAIT_S = 3.0  # nobody should wonder longer than this why nothing happens
RETRIED_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504, 520, 521, 522, 523, 524, 529})


@dataclass(frozen=True)
class RetryPolicy:
    """How patient to be.

    Attributes:
        attempts: failures in a row, without a single new byte, after which to give up.
        first_attempts: the same where nothing ever answered: a wrong address or no network, not a hiccup.
        first_s, longest_s: the back-off doubles from the one to the other.
        longest_asked_s: a server that asks for a longer pause than this gets none; the user is told instead.
    """

    attempts: int = 8
    first_attempts: int = 3
    first_s: float = 0.5
    longest_s: float = 30.0
    longest_asked_s: float = 900.0

    def delay(self, failures: int, asked_s: float | None, jitter: float) -> float:
        """Seconds to wait after the `failures`-th failure in a row (from 1).

        Args:
            asked_s: what the server asked for; never undercut.
            jitter: in [0, 1): keeps many clients from coming back together.
        """
        backoff = min(self.longest_s, self.first_s * 2.0 ** (failures - 1)) * (0.75 + 0.5 * jitter)
        return max(backoff, asked_s or 0.0)


class Patience:
    """Counts failures in a row for one thing asked of a server, and waits between them.

    Args:
        stop: set by whoever wants the waiting to end (Ctrl-C, another file's failure).
        reporter: hears of every wait before it begins; the person too, if it is a long one.
    """

    def __init__(self, policy: RetryPolicy, stop: threading.Event, reporter: Reporter) -> None:
        self._policy, self._stop, self._reporter = policy, stop, reporter
        self._failures = 0

    def progress(self) -> None:
        """New bytes came: start counting from zero."""
        self._failures = 0

    def wait(self, what: str, problem: str, asked_s: float | None = None, *, unreached: bool = False) -> None:
        """Waits before the next attempt.

        Args:
            unreached: nobody was there, and nobody ever was.

        Raises:
            IncompleteError: patience is at its end, or the server asks for more than we grant.
        """
        self._failures += 1
        if self._failures >= (self._policy.first_attempts if unreached else self._policy.attempts):
            raise IncompleteError(f"{what}: {problem}; gave up after {self._failures} attempts.", RUN_AGAIN)
        if asked_s is not None and asked_s > self._policy.longest_asked_s:
            raise IncompleteError(
                f"{what}: {problem}, and the server asks to wait {asked_s:.0f} s.",
                "Run the same command again after that time; a token (HF_TOKEN) raises the Hub's limits.",
            )
        delay = self._policy.delay(self._failures, asked_s, random.random())
        tell = self._reporter.note if delay >= LONG_WAIT_S else self._reporter.detail
        tell(f"{what}: {problem}; trying again in {delay:.1f} s")
        if self._stop.wait(delay):
            raise Stopped


RUN_AGAIN = "Run the same command again: it goes on where it stopped."


class Stopped(Exception):
    """Somebody else ended the work; whoever meets this leaves quietly."""


def asked_delay(headers: Mapping[str, str], now: datetime | None = None) -> float | None:
    """Seconds a response asks to wait: `Retry-After` (RFC 9110, 10.2.3: seconds or a date), or the Hub's `RateLimit`.

    The Hub's header follows draft-ietf-httpapi-ratelimit-headers: `"api";r=0;t=55`, t being seconds until the reset.
    """
    value = headers.get("Retry-After") or headers.get("retry-after")
    if value:
        if re.fullmatch(r"[0-9]+", value.strip()):
            return float(value)
        try:
            date = email.utils.parsedate_to_datetime(value)
        except (ValueError, OverflowError):
            return None
        if date.tzinfo is None:
            date = date.replace(tzinfo=timezone.utc)
        return max(0.0, (date - (now or datetime.now(timezone.utc))).total_seconds())
    limit = re.search(r"\br=0\b.*?\bt=(\d+)", headers.get("RateLimit") or headers.get("ratelimit") or "")
    return float(limit[1]) if limit else None
