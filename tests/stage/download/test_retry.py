"""How long to wait: what the server asks, in any form, and never less than our own back-off."""

from __future__ import annotations

from datetime import datetime, timezone

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stage.download.retry import AttemptFailed, Retries, RetryPolicy, Stopped, asked_delay
from stage.errors import IncompleteError
from stage.progress import Reporter

NOW = datetime(2026, 2, 3, 4, 5, 6, tzinfo=timezone.utc)


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"Retry-After": "7"}, 7.0),
        ({"Retry-After": " 120 "}, 120.0),
        ({"Retry-After": "0"}, 0.0),
        ({"Retry-After": "Tue, 03 Feb 2026 04:05:36 GMT"}, 30.0),
        ({"Retry-After": "Tue, 03 Feb 2026 05:05:36 +0100"}, 30.0),
        ({"Retry-After": "Tue, 03 Feb 2026 04:05:36 -0000"}, 30.0),
        ({"Retry-After": "Tuesday, 03-Feb-26 04:05:36 GMT"}, 30.0),
        ({"Retry-After": "Tue, 03 Feb 2026 04:05:00 GMT"}, 0.0),
        ({"RateLimit": '"api";r=0;t=55'}, 55.0),
        ({"RateLimit": '"pages";r=3;t=9, "resolvers";r=0;t=211'}, 211.0),
        ({"RateLimit": '"api";r=10;t=55'}, None),
        ({"RateLimit": "limit=100"}, None),
        ({"Retry-After": "3", "RateLimit": '"api";r=0;t=55'}, 3.0),
        ({"Retry-After": "soon"}, None),
        ({"Retry-After": "-5"}, None),
        ({"Retry-After": "²"}, None),
        ({"Retry-After": "Mon, 99 Jan 99999999999 00:00:00 GMT"}, None),
        ({"Retry-After": ""}, None),
        ({}, None),
    ],
)
def test_the_wait_a_server_asks_for_is_understood(
    headers: dict[str, str], seconds: float | None
) -> None:
    assert asked_delay(headers, NOW) == seconds


@given(st.text(max_size=30), st.text(max_size=30))
@example("Fri, 31 Dec 9999 23:59:59 -2359", "")
@example("", '"api";r=0;t=99999999999999999999')
def test_no_header_breaks_us(retry_after: str, ratelimit: str) -> None:
    asked = asked_delay({"Retry-After": retry_after, "RateLimit": ratelimit}, NOW)
    assert asked is None or asked >= 0


@pytest.mark.parametrize(
    ("failures", "asked_s", "jitter", "seconds"),
    [
        (1, None, 0.0, 0.375),
        (1, None, 0.5, 0.5),
        (2, None, 0.5, 1.0),
        (5, None, 0.5, 8.0),
        (7, None, 0.5, 30.0),
        (7, None, 0.0, 22.5),
        (2, 0.5, 0.5, 1.0),
        (2, 90.0, 0.5, 90.0),
    ],
)
def test_the_wait_doubles_up_to_its_bound(
    failures: int, asked_s: float | None, jitter: float, seconds: float
) -> None:
    assert RetryPolicy().delay(failures, asked_s, jitter) == seconds


@given(st.integers(1, 100), st.none() | st.floats(0, 1e4), st.floats(0, 0.999))
def test_the_server_is_never_undercut_and_the_back_off_is_bounded(
    failures: int, asked_s: float | None, jitter: float
) -> None:
    policy = RetryPolicy()
    delay = policy.delay(failures, asked_s, jitter)
    assert delay >= (asked_s or 0) and delay <= max(asked_s or 0, policy.longest_s * 1.25)
    assert delay >= 0.75 * min(policy.longest_s, policy.first_s * 2 ** min(failures - 1, 50))


class Flaky:
    """A request that fails so often; each attempt may bring bytes first."""

    def __init__(self, failed: AttemptFailed, failures: int, bytes_each: int = 0) -> None:
        self.failed, self.failures, self.bytes_each = failed, failures, bytes_each
        self.received = 0

    def __call__(self) -> str:
        self.received += self.bytes_each
        if self.failures:
            self.failures -= 1
            raise self.failed
        return "done"


def called(flaky: Flaky, *, stopped: bool = False, advice: str = "", **policy: float) -> str:
    retries = Retries(
        RetryPolicy(**{"first_s": 0.001, **policy}),  # type: ignore[arg-type]
        Reporter(quiet=True),
    )
    if stopped:
        retries.stop.set()
    return retries.call("bert: model", flaky, lambda: flaky.received, advice)


def test_it_ends_after_so_many_failures_in_a_row_and_says_to_run_again() -> None:
    assert called(Flaky(AttemptFailed("reset"), 2), attempts=3) == "done"
    with pytest.raises(IncompleteError, match=r"^reset; gave up after 3 attempts") as end:
        called(Flaky(AttemptFailed("reset"), 3), attempts=3, advice=" Name a mirror.")
    assert end.value.exit_code == 5 and end.value.remedy.endswith("stopped. Name a mirror.")


def test_an_attempt_with_new_bytes_starts_the_count_again() -> None:
    assert called(Flaky(AttemptFailed("reset"), 9, bytes_each=1), attempts=3) == "done"


def test_a_server_that_asks_for_an_hour_is_reported_at_once() -> None:
    with pytest.raises(IncompleteError, match="asks to wait 3600 s"):
        called(Flaky(AttemptFailed("HTTP 429", 3600.0), 1))
    with pytest.raises(IncompleteError, match="asks to wait inf s"):
        called(Flaky(AttemptFailed("HTTP 429", asked_delay({"Retry-After": "9" * 400})), 1))


def test_a_wait_ends_when_the_work_is_stopped() -> None:
    with pytest.raises(Stopped):
        called(Flaky(AttemptFailed("HTTP 429", 600.0), 1), stopped=True)
