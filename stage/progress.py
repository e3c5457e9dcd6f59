"""What a person sees while work goes on: lines in a log, a bar on a terminal, all on stderr.

Results go to stdout and are the command line's business; everything here may be thrown away without loss.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from stage.disk import human_size
from stage.errors import as_shown

LOG_EVERY_S = 30.0  # how often a log file hears that a long transfer is still alive


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
        """Progress of a known number of bytes; yields the function to call with each count just done."""
        if self._quiet:
            yield lambda count: None
        elif sys.stderr.isatty():
            yield from self._terminal_bar(what, total)
        else:
            yield _LogBar(what, total, self._write).add

    def _terminal_bar(self, what: str, total: int) -> Iterator[Callable[[int], None]]:
        from tqdm import tqdm

        with tqdm(total=total or None, desc=what, unit="B", unit_scale=True, file=sys.stderr, leave=False) as bar:
            self._bar = bar

            def add(count: int) -> None:
                with self._lock:
                    bar.update(count)

            try:
                yield add
            finally:
                self._bar = None


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
            rate = self._done / (now - self._began)
            left = f", {(self._total - self._done) / rate:.0f} s left" if self._total > self._done and rate else ""
            of = f" of {human_size(self._total)}" if self._total else ""
            text = f"{self._what}: {human_size(self._done)}{of}, {human_size(rate)}/s{left}"
        self._write(text)
