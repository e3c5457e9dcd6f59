"""Text for a terminal: control characters escaped, colours that mean something, whole words.

`shown(text, stream)` is text as that stream should get it. A file or a pipe gets the text as it is.
Colours: errors are red, verdicts that are good are green, warnings are yellow, commands are cyan.
NO_COLOR, FORCE_COLOR and TERM=dumb count, in this order. Lines are wrapped at spaces to the width
of the terminal; a path or a command stays on one line, so that it can be copied.
"""

from __future__ import annotations

import os
import re
import textwrap
import unicodedata
from collections.abc import Mapping
from typing import TextIO

from stage.errors import as_shown

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
