"""What a person sees while work goes on, all of it on stderr: lines in a log, one line that moves on a terminal.

One display for all files of a step: how much of how much, how fast, how long to go. Results go to stdout and are the
command line's business; everything here may be thrown away without loss.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from stage.disk import human_size
from stage.errors import as_shown

LOG_EVERY_S = 30.0  # how often a log hears that long work is still alive
NARROW = 60  # columns: below, a bar would leave no room for rate and time
_WIDE_LINE = "{desc} {percentage:3.0f}% |{bar}| {n_fmt}B of {total_fmt}B, {rate_fmt}, {remaining} left"
_NARROW_LINE = "{desc} {percentage:3.0f}%, {rate_fmt}, {remaining} left"
_ENDLESS_LINE = "{desc} {n_fmt}B, {rate_fmt}"
_CLOCK_LINE = "{desc} ({elapsed})"


class Reporter:
    """Prints notes, warnings and progress; safe to call from several threads.

    Args:
        quiet: print warnings only.
        verbose: print details as well.
    """

    def __init__(self, *, quiet: bool = False, verbose: bool = False) -> None:
        self._quiet = quiet
        self._verbose = verbose
        self._lock = threading.Lock()
        self._bar: Any = None

    def __enter__(self) -> Reporter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def note(self, text: str) -> None:
        """Something worth knowing: a choice and its reason, a step done."""
        if not self._quiet:
            self._write(text)

    def detail(self, text: str) -> None:
        """Something worth knowing for whoever asked with -v."""
        if self._verbose and not self._quiet:
            self._write(text)

    def warn(self, text: str) -> None:
        """Something to look at; printed even when quiet."""
        self._write(f"warning: {text}")

    def _write(self, text: str) -> None:
        text = as_shown(text)
        with self._lock:
            if self._bar is not None:
                self._bar.write(text, file=sys.stderr)
            else:
                print(text, file=sys.stderr, flush=True)

    @contextmanager
    def bytes_bar(self, what: str, total: int) -> Iterator[Callable[[int], None]]:
        """Progress of bytes; yields the function to call with each count just done.

        Args:
            total: bytes in all; 0 if nobody knows.
        """
        if self._quiet:
            yield lambda count: None
        elif _is_terminal():
            with self._line(what, total, None) as bar:
                yield bar
        else:
            yield _LogBar(what, total, self._write).add

    @contextmanager
    def at_work(self, what: str) -> Iterator[None]:
        """A clock, for work of which nobody knows how long it takes: a conversion, a child process."""
        if self._quiet:
            yield
            return
        done = threading.Event()
        if _is_terminal():
            with self._line(what, 0, _CLOCK_LINE), _ticking(done, 1.0, self._refresh):
                yield
        else:
            began = time.monotonic()
            tell = lambda: self._write(f"{what}: {human_time(time.monotonic() - began)} so far")  # noqa: E731
            with _ticking(done, LOG_EVERY_S, tell):
                yield

    def _refresh(self) -> None:
        with self._lock:
            if self._bar is not None:
                self._bar.refresh()

    @contextmanager
    def _line(self, what: str, total: int, line: str | None) -> Iterator[Callable[[int], None]]:
        from tqdm import tqdm

        class Line(tqdm):  # type: ignore[misc]
            """Says what fits: the width is asked anew each time, since windows are resized."""

            @property
            def format_dict(self) -> dict[str, Any]:
                facts: dict[str, Any] = super().format_dict
                narrow = (facts["ncols"] or 80) < NARROW
                chosen = _NARROW_LINE if narrow else _WIDE_LINE
                return facts | {"bar_format": line or (chosen if facts["total"] else _ENDLESS_LINE)}

        with Line(
            total=total or None,
            desc=as_shown(what),
            unit="B",
            unit_scale=True,
            file=sys.stderr,
            leave=False,
            dynamic_ncols=True,
            ascii=" =",  # blocks and shades are boxes on a terminal that is not UTF-8, whatever Python's mode is
            smoothing=0.1,
        ) as bar:
            self._bar = bar

            def add(count: int) -> None:
                with self._lock:
                    bar.update(count)

            try:
                yield add
            finally:
                self._bar = None


def _is_terminal() -> bool:
    """Whether a line can be written over: a dumb terminal (an editor's shell) shows each version of it."""
    return sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"


@contextmanager
def _ticking(done: threading.Event, every_s: float, tick: Callable[[], None]) -> Iterator[None]:
    def run() -> None:
        while not done.wait(every_s):
            tick()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


class _LogBar:
    """A line now and then, for a log that nobody watches but somebody will read."""

    def __init__(self, what: str, total: int, write: Callable[[str], None]) -> None:
        self._what, self._total, self._write = what, total, write
        self._lock = threading.Lock()
        self._done = 0
        self._began = self._told = time.monotonic()

    def add(self, count: int) -> None:
        with self._lock:
            self._done += count
            now = time.monotonic()
            if now - self._told < LOG_EVERY_S:
                return
            self._told = now
            text = log_line(self._what, self._done, self._total, now - self._began)
        self._write(text)


def log_line(what: str, done: int, total: int, took_s: float) -> str:
    """A line of a log: bytes done of all (0: unknown), the rate since the beginning, and the time that leaves."""
    rate = done / took_s
    of = f" of {human_size(total)}" if total else ""
    left = f", {human_time((total - done) / rate)} left" if total > done and rate > 0 else ""
    return f"{what}: {human_size(done)}{of}, {human_size(rate)}/s{left}"


def human_time(seconds: float) -> str:
    """A duration as people say it: `40 s`, `12 min`, `3 h 20 min`."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"
