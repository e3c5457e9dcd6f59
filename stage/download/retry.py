"""When to try a request again, how long to wait before, and when to give up.

All requests of a run share one policy: those for bytes (`downloader`), and those for what a Hub
says about its repositories (`stage.hub.client`). An attempt that may succeed later raises
`AttemptFailed`; any other error is final.
"""

from __future__ import annotations

import email.utils
import random
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TypeVar

from stage.errors import IncompleteError
from stage.progress import Reporter

T = TypeVar("T")


class Stopped(Exception):
    """The work was ended from outside. Work that raises it did not fail."""


LONG_WAIT_S = 3.0  # a longer wait is printed
RUN_AGAIN = "Run the same command again: it continues where it stopped."
UNREACHED = (
    "No connection was made. Look at the network (many clusters have none), at the proxy "
    "(https_proxy), and at the address. Then run the same command again."
)
# 408, 425, 429: come later (RFC 9110, 8470, 6585); 5xx: proxies, and 52x and 529 are Cloudflare's.
_RETRIED_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504, 520, 521, 522, 523, 524, 529})


class AttemptFailed(Exception):
    """This attempt failed; another attempt may succeed.

    Args:
        problem: why it failed, for messages.
        asked_s: seconds that the server asks to wait.
        unreached: no connection to this server was made, now or earlier in this run.
        remedy: the advice where no attempt succeeds; empty: the usual one.
    """

    def __init__(
        self,
        problem: str,
        asked_s: float | None = None,
        *,
        unreached: bool = False,
        remedy: str = "",
    ) -> None:
        super().__init__(problem)
        self.problem, self.asked_s, self.unreached = problem, asked_s, unreached
        self.remedy = remedy


def check_status(status: int, headers: Mapping[str, str]) -> None:
    """Checks that an HTTP status is not a temporary failure.

    Raises:
        AttemptFailed: the server is busy, limits the rate, or is broken for the moment.
    """
    if status in _RETRIED_STATUS:
        raise AttemptFailed(f"HTTP {status}", asked_delay(headers))


@dataclass(frozen=True)
class RetryPolicy:
    """How often to retry, and how long to wait.

    Attributes:
        attempts: failures in a row, without one new byte, after which to give up.
        first_attempts: the same where this server never answered. That is a wrong address or no
            network, and waiting does not help.
        first_s, longest_s: the wait doubles from the first value to the second.
        longest_asked_s: if a server asks for a longer wait, the run ends with a message.
    """

    attempts: int = 8  # with a minute of waits in all: servers and proxies restart in less
    first_attempts: int = 3
    first_s: float = 0.5
    longest_s: float = 30.0
    longest_asked_s: float = 900.0  # the Hub counts requests in windows of five minutes

    def delay(self, failures: int, asked_s: float | None, jitter: float) -> float:
        """Seconds to wait after the `failures`-th failure in a row (counted from 1).

        Args:
            asked_s: what the server asked for; the wait is never shorter.
            jitter: in [0, 1): keeps many clients from returning at the same moment.
        """
        backoff = min(self.longest_s, self.first_s * 2.0 ** (failures - 1)) * (0.75 + 0.5 * jitter)
        return max(backoff, asked_s or 0.0)


class Retries:
    """Repeats requests by one policy.

    Args:
        reporter: prints each wait before it begins: a long one as a note, a short one as a detail.
    """

    def __init__(self, policy: RetryPolicy, reporter: Reporter) -> None:
        self._policy, self._reporter = policy, reporter
        self.stop = threading.Event()  # ends all waits (Ctrl-C, or another file failed)

    def call(
        self,
        what: str,
        attempt: Callable[[], T],
        received: Callable[[], int] = lambda: 0,
        advice: str = "",
    ) -> T:
        """Calls `attempt` until it does not fail.

        Args:
            what: the name of the request, for the notes on waits. Errors have no place.
            received: bytes so far. More than ever before starts the count of failures again.
            advice: added to the remedy where it gives up.

        Raises:
            IncompleteError: too many failures, or the server asks for too long a wait.
            Stopped: `stop` was set.
        """
        failures, most = 0, received()
        while True:
            try:
                return attempt()
            except AttemptFailed as failed:
                now = received()
                # A slow line that breaks every minute still ends: each new byte is progress.
                failures = 1 if now > most else failures + 1
                most = max(most, now)  # an attempt may begin again at the first byte
                self._wait(what, failed, failures, advice)

    def _wait(self, what: str, failed: AttemptFailed, failures: int, advice: str) -> None:
        policy, asked_s = self._policy, failed.asked_s
        if failures >= (policy.first_attempts if failed.unreached else policy.attempts):
            raise IncompleteError(
                f"{failed.problem}; gave up after {failures} attempts.",
                failed.remedy or (UNREACHED if failed.unreached else RUN_AGAIN) + advice,
            )
        if asked_s is not None and asked_s > policy.longest_asked_s:
            raise IncompleteError(
                f"{failed.problem}, and the server asks to wait {asked_s:.0f} s.",
                "Run the same command again after that time. "
                f"A token (HF_TOKEN) raises the Hub's limits.{advice}",
            )
        delay = policy.delay(failures, asked_s, random.random())
        report = self._reporter.note if delay >= LONG_WAIT_S else self._reporter.detail
        report(f"{what}: {failed.problem}; trying again in {delay:.1f} s")
        # Not `time.sleep`: Ctrl-C, or the failure of another file, ends the wait at once.
        if self.stop.wait(delay):
            raise Stopped


def asked_delay(headers: Mapping[str, str], now: datetime | None = None) -> float | None:
    """Seconds that a response asks to wait; None if it does not ask.

    Reads `Retry-After` (RFC 9110, 10.2.3: seconds or a date), else the Hub's `RateLimit`. That
    header follows draft-ietf-httpapi-ratelimit-headers: in `"api";r=0;t=55`, t is the number of
    seconds until the reset.
    """
    value = headers.get("Retry-After", "").strip()
    if re.fullmatch(r"[0-9]+", value):
        return float(value)
    if value:
        try:
            date = email.utils.parsedate_to_datetime(value)
        except (ValueError, OverflowError):
            return None
        if date.tzinfo is None:
            date = date.replace(tzinfo=timezone.utc)
        return max(0.0, (date - (now or datetime.now(timezone.utc))).total_seconds())
    limit = re.search(r"\br=0\b.*?\bt=(\d+)", headers.get("RateLimit", ""))
    return float(limit[1]) if limit else None
