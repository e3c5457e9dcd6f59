"""What people see on stderr: text as a terminal should get it, notes, warnings and progress.

`shown(text, stream)` is text as that stream should get it. Control characters are escaped. A file
or a pipe gets no more changes. Colours: errors are red, verdicts that are good are green, warnings
are yellow, commands are cyan. NO_COLOR, FORCE_COLOR and TERM=dumb count, in this order. Lines are
wrapped at spaces to the width of the terminal; a path or a command stays on one line, so that it
can be copied.

`Reporter` prints progress: lines in a log, one changing line on a terminal. One display covers all
files of a step: bytes done, bytes in all, rate, time left. The command line prints results on
stdout.
"""

from __future__ import annotations

import os
import re
import sys
import textwrap
import threading
import time
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, TextIO

from stage.errors import as_shown
from stage.files import format_age, human_size

_NARROWEST = 20  # columns; in fewer, nothing is wrapped
_RESET = "\033[0m"
_RED, _GREEN, _YELLOW, _CYAN = "\033[1;31m", "\033[32m", "\033[33m", "\033[36m"

_PROGRAM = (
    r"(?:stage|runner|srun|sbatch|squeue|scancel|rsync|pip|python3?|sh|uv|conda|ssh-keygen|"
    r"sha256sum|mkdir|chmod|namei|rm|mv|export)"
)
# A command stands in backticks, or it follows `-> `, `: ` or the beginning of a line. What a colon
# follows is not a command: "runner check: no --bundle".
_COMMAND = re.compile(
    rf"(?P<quoted>`[^`\n]+`)|(?:(?<=-> )|(?<=: )|^ *)(?P<bare>{_PROGRAM} (?:(?!: )[^\n])+?)"
    r"(?=$|[;,.)](?:\s|$)| \(| {2,})",
    re.MULTILINE,
)
_WORDS = (
    (re.compile(r"^error:", re.MULTILINE), _RED),
    (re.compile(r"^\s*warning:", re.MULTILINE), _YELLOW),
    (re.compile(r"(?<=: )(?:sound|finished)\b(?! already)"), _GREEN),
    (re.compile(r"^nothing found that would fail"), _GREEN),
)
# In place of spaces that are not broken, and beside a wide character. Here no text has control
# characters: `as_shown` has escaped them.
_GLUE, _FILL = "\x1f", "\x1e"
_PREFIX = re.compile(r"\s*(?:error: |warning: |-> |\d+\. )?")


def shown(text: str, stream: TextIO, environ: Mapping[str, str] = os.environ) -> str:
    """Text as a stream should get it."""
    text = as_shown(text)
    width = width_of(stream)
    if width is not None and width >= _NARROWEST:
        text = wrapped(text, width)
    return coloured(text) if has_colour(stream, environ) else text


def has_colour(stream: TextIO, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a stream gets colours (no-color.org, force-color.org)."""
    if environ.get("NO_COLOR"):
        return False
    if environ.get("FORCE_COLOR"):
        return environ["FORCE_COLOR"] != "0"
    return stream.isatty() and environ.get("TERM", "dumb") != "dumb"


def coloured(text: str) -> str:
    """Text with colours. Pure."""
    marks = [
        (match.span(), colour) for pattern, colour in _WORDS for match in pattern.finditer(text)
    ]
    marks += [(match.span(match.lastgroup or 0), _CYAN) for match in _COMMAND.finditer(text)]
    result, end = [], 0
    for (start, stop), colour in sorted(marks, key=lambda mark: mark[0][0]):
        if start >= end:  # the first mark wins
            result += [text[end:start], colour, text[start:stop], _RESET]
            end = stop
    return "".join([*result, text[end:]])


def wrapped(text: str, width: int) -> str:
    """Text in lines of at most `width` columns, broken at spaces only. Pure.

    What is longer than a line, such as a path or a command, stays whole. Characters of Chinese take
    two columns.
    """
    lines: list[str] = []
    for line in text.split("\n"):
        glued = _COMMAND.sub(_glued, line)
        filled = "".join(c + _FILL * (unicodedata.east_asian_width(c) in "WF") for c in glued)
        if len(filled) <= width:
            lines.append(line)
            continue
        match = _PREFIX.match(filled)
        start = match[0] if match else ""
        is_mark = start.strip() in ("->", "")
        indent = len(start) if is_mark else len(start) - len(start.lstrip()) + 2
        lines += textwrap.wrap(
            filled.removeprefix(start),
            width,
            initial_indent=start,
            subsequent_indent=" " * indent,
            break_long_words=False,
            break_on_hyphens=False,
            replace_whitespace=False,
        )
    return "\n".join(lines).replace(_GLUE, " ").replace(_FILL, "")


def _glued(match: re.Match[str]) -> str:
    """A command without spaces, so that it is not broken."""
    command = match[match.lastgroup or 0]
    return match[0].removesuffix(command) + command.replace(" ", _GLUE)


def width_of(stream: TextIO) -> int | None:
    """The columns of a terminal; None: not a terminal, or its width is unknown."""
    if not stream.isatty():
        return None
    asked = os.environ.get("COLUMNS", "")  # as shutil.get_terminal_size has it, for stdout only
    try:
        return int(asked) if asked else os.get_terminal_size(stream.fileno()).columns or None
    except (OSError, ValueError):
        return None


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
        text = shown(text, sys.stderr, os.environ)
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
            line = _WIDE_LINE if (width_of(sys.stderr) or 80) >= NARROW else _NARROW_LINE
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
