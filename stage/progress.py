"""Progress on stderr: lines in a log, one changing line on a terminal.

One display covers all files of a step: bytes done, bytes in all, rate, time left. The command line
prints results on stdout.
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

from stage import terminal
from stage.errors import as_shown
from stage.files import human_size

LOG_EVERY_S = 30.0  # seconds between two lines in a log
NARROW = 60  # columns: in fewer, a bar leaves no space for rate and time
_WIDE_LINE = (
    "{desc} {percentage:3.0f}% |{bar}| {n_fmt}B of {total_fmt}B, {rate_fmt}, {remaining} left"
)
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
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def note(self, text: str) -> None:
        """Prints a choice and its reason, or a finished step."""
        if not self._quiet:
            self._write(text)

    def detail(self, text: str) -> None:
        """Prints a detail, with -v only."""
        if self._verbose and not self._quiet:
            self._write(text)

    def warn(self, text: str) -> None:
        """Prints a warning, also when quiet."""
        self._write(f"warning: {text}")

    def _write(self, text: str) -> None:
        text = terminal.shown(text, sys.stderr, os.environ)
        with self._lock:
            if self._bar is not None:
                self._bar.write(text, file=sys.stderr)
            else:
                print(text, file=sys.stderr, flush=True)

    @contextmanager
    def bytes_bar(self, what: str, total: int) -> Iterator[Callable[[int], None]]:
        """Progress of bytes. Yields the function to call with each number of bytes done.

        Args:
            total: bytes in all; 0 if unknown.
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
        """A clock, for work of unknown length: a conversion, a child process."""
        if self._quiet:
            yield
            return
        done = threading.Event()
        if _is_terminal():
            with self._line(what, 0, _CLOCK_LINE), _ticking(done, 1.0, self._refresh):
                yield
        else:
            began = time.monotonic()

            def write() -> None:
                self._write(f"{what}: {human_time(time.monotonic() - began)} so far")

            with _ticking(done, LOG_EVERY_S, write):
                yield

    def _refresh(self) -> None:
        with self._lock:
            if self._bar is not None:
                self._bar.refresh()

    @contextmanager
    def _line(self, what: str, total: int, line: str | None) -> Iterator[Callable[[int], None]]:
        from tqdm import tqdm

        class Line(tqdm):  # type: ignore[misc]
            """Fits its width, which is read each time because windows are resized."""

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
            ascii=" =",  # blocks are unreadable on a terminal that is not UTF-8
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
    """Whether a line can be overwritten: a dumb terminal (an editor's shell) shows each version."""
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
    """A line every `LOG_EVERY_S` seconds, for a log."""

    def __init__(self, what: str, total: int, write: Callable[[str], None]) -> None:
        self._what, self._total, self._write = what, total, write
        self._lock = threading.Lock()
        self._done = 0
        self._began = self._written = time.monotonic()

    def add(self, count: int) -> None:
        with self._lock:
            self._done += count
            now = time.monotonic()
            if now - self._written < LOG_EVERY_S:
                return
            self._written = now
            text = log_line(self._what, self._done, self._total, now - self._began)
        self._write(text)


def log_line(what: str, done: int, total: int, took_s: float) -> str:
    """A line of a log: bytes done of all (0: unknown), rate since the beginning, time left."""
    rate = done / took_s
    of = f" of {human_size(total)}" if total else ""
    left = f", {human_time((total - done) / rate)} left" if total > done and rate > 0 else ""
    return f"{what}: {human_size(done)}{of}, {human_size(rate)}/s{left}"


def human_time(seconds: float) -> str:
    """A duration: `40 s`, `12 min`, `3 h 20 min`."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"
