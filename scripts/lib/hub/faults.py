"""The faults that an embedded Hub injects, and the log of its requests.

A `Fault` matches some requests and changes their answers; the first rule that matches and has hits
left acts. Each request becomes an `Exchange` in the `RequestLog`, which tests read afterwards.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(kw_only=True)
class Fault:
    """A rule: the requests that it matches, and what happens to them.

    Attributes:
        side: "hub", "cdn" or "any".
        method: GET, HEAD, ...; None for all.
        path: regular expression, searched in the URL's path and in `<kind>/<id>/<file>` (on both
            sides).
        times: how often it acts (None: always).
        status, headers, body: answer this instead of the file.
        close: hang up without an answer.
        delay_s: seconds to wait before answering.
        drop_after: hang up after this many bytes of the body; with `reset`, by a TCP reset.
        stall_after, stall_s: after this many bytes of the body, send nothing for `stall_s` seconds.
        corrupt_at: flip a bit of the byte at this offset of the file.
        truncate_to: serve the file as if it ended there, Content-Length included.
        ignore_range: answer a Range request with 200 and everything.
        rate_mbps: megabytes per second.
    """

    side: str = "any"
    method: str | None = None
    path: str = ""
    times: int | None = None
    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    body: str = ""
    close: bool = False
    reset: bool = False
    delay_s: float = 0.0
    drop_after: int | None = None
    stall_after: int | None = None
    stall_s: float = 3600.0
    corrupt_at: int | None = None
    truncate_to: int | None = None
    ignore_range: bool = False
    rate_mbps: float | None = None
    seen: int = 0

    @property
    def touches_the_body(self) -> bool:
        """Whether a body must be sent piece by piece for this fault to happen."""
        edges = (self.drop_after, self.stall_after, self.corrupt_at, self.rate_mbps)
        return any(edge is not None for edge in edges)

    def applies(self, side: str, method: str, names: list[str]) -> bool:
        """Whether the rule matches this request; counts nothing."""
        return (
            self.side in ("any", side)
            and self.method in (None, method)
            and any(re.search(self.path, name) for name in names)
        )


class Faults:
    """An ordered list of rules, shared by the threads that answer."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rules: list[Fault] = []

    def add(self, **rule: Any) -> Fault:
        fault = Fault(**rule)
        with self._lock:
            self._rules.append(fault)
        return fault

    def clear(self) -> None:
        with self._lock:
            self._rules.clear()

    def match(self, side: str, method: str, names: list[str]) -> Fault:
        """The rule that acts on this request; a rule that does nothing if there is none."""
        with self._lock:
            for rule in self._rules:
                if rule.applies(side, method, names):
                    rule.seen += 1
                    if rule.times is None or rule.seen <= rule.times:
                        return rule
        return Fault()


@dataclass
class Exchange:
    """One request and its answer.

    Attributes:
        file: `<kind>/<id>/<path>` of a request for a file, on either side.
        token: whether it had an Authorization header.
        user: the user of that token; None for a wrong one.
        at: time of arrival, seconds since 1970.
        sent: bytes of the body passed to the network, which may be more than arrived.
        finished: the last byte was sent, or the connection is gone.
    """

    side: str
    method: str
    path: str
    file: str | None
    range: str | None
    token: bool
    user: str | None
    at: float
    status: int | None = None
    sent: int = 0
    finished: bool = False


class RequestLog:
    """All exchanges, in order of arrival."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._exchanges: list[Exchange] = []

    def begin(self, exchange: Exchange) -> None:
        with self._changed:
            self._exchanges.append(exchange)

    def end(self, exchange: Exchange) -> None:
        with self._changed:
            exchange.finished = True
            self._changed.notify_all()

    def clear(self) -> None:
        with self._changed:
            self._exchanges.clear()

    def find(self, path: str = "", *, settle_s: float = 0.5, **equal: object) -> list[Exchange]:
        """Exchanges whose URL path or file matches, and whose fields equal the given values.

        A client may have its answer before the server has recorded how much it sent: waits up to
        `settle_s` seconds for requests under way.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: all(exchange.finished for exchange in self._exchanges), settle_s
            )
            return [
                replace(exchange)
                for exchange in self._exchanges
                if (re.search(path, exchange.path) or re.search(path, exchange.file or ""))
                and all(getattr(exchange, name) == value for name, value in equal.items())
            ]
