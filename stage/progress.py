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
from contextlib import contextmanager, nullcontext
from typing import Any

from stage import terminal
from stage.errors import as_shown
from stage.files import format_age, human_size

LOG_EVERY_S = 30.0  # between two lines in a log: an hour is 120 of them
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
        self._lock = threading.RLock()
        self._bar: Any = None

    def __enter__(self) -> Reporter:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def note(self, text: str) -> None:
        """Prints a choice and its reason, or a finished step."""
        if not self._quiet:
            self._write(text)

    def detail(self, text: str) -> None:
        """Prints a detail, with -v only."""
        if self._verbose:
            self.note(text)

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
        if _is_terminal() and not self._quiet:
            line = _WIDE_LINE if (terminal.width_of(sys.stderr) or 80) >= NARROW else _NARROW_LINE
            with self._line(what, total, line if total else _ENDLESS_LINE) as add:
                yield add
            return
        done, began = 0, time.monotonic()
        written = began

        def count(size: int) -> None:
            nonlocal done, written
            with self._lock:
                done += size
                now = time.monotonic()
                if not self._quiet and now - written >= LOG_EVERY_S:
                    written = now
                    self._write(log_line(what, done, total, now - began))

        yield count

    @contextmanager
    def at_work(self, what: str) -> Iterator[None]:
        """A clock, for work of unknown length: a conversion, a child process."""
        if self._quiet:
            yield
            return
        done, began = threading.Event(), time.monotonic()
        is_terminal = _is_terminal()

        def tick() -> None:
            while not done.wait(1.0 if is_terminal else LOG_EVERY_S):
                with self._lock:
                    if self._bar is not None:
                        self._bar.refresh()
                    else:
                        self._write(f"{what}: {format_age(time.monotonic() - began)} so far")

        thread = threading.Thread(target=tick, daemon=True)
        with self._line(what, 0, _CLOCK_LINE) if is_terminal else nullcontext():
            thread.start()
            try:
                yield
            finally:
                done.set()
                thread.join()

    @contextmanager
    def _line(self, what: str, total: int, line: str) -> Iterator[Callable[[int], None]]:
        from tqdm import tqdm

        with tqdm(
            total=total or None,
            desc=as_shown(what),
            bar_format=line,
            unit="B",
            unit_scale=True,
            file=sys.stderr,
            leave=False,
            dynamic_ncols=True,
            ascii=" =",  # blocks are unreadable on a terminal that is not UTF-8
            smoothing=0.1,
        ) as self._bar:

            def add(count: int) -> None:
                with self._lock:
                    self._bar.update(count)

            try:
                yield add
            finally:
                self._bar = None


def _is_terminal() -> bool:
    """Whether a line can be overwritten: a dumb terminal (an editor's shell) shows each version."""
    return sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def log_line(what: str, done: int, total: int, took_s: float) -> str:
    """A line of a log: bytes done of all (0: unknown), rate since the beginning, time left."""
    rate = done / took_s
    of = f" of {human_size(total)}" if total else ""
    left = f", {format_age((total - done) / rate)} left" if total > done and rate > 0 else ""
    return f"{what}: {human_size(done)}{of}, {human_size(rate)}/s{left}"
