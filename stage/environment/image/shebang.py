"""The first lines of an environment's Python scripts, for a path of any length. Pure.

Kernels before 5.1 cut a first line after 127 bytes, and an environment's prefix may be longer. So
sh starts the script with Python, to which the lines for sh are a string.

Python gets `-s`: packages in `~/.local` would be imported before those of the environment.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

LONGEST = 127
"""Bytes of a first line that any kernel reads."""

_PYTHON = re.compile(
    rb"#![ \t]*(?P<prefix>/\S*)/bin/(?P<python>python[0-9.]*)(?P<options>[ \t][^\n]*)?\n"
)
# py-rattler writes one line, `trampoline` two.
_TRAMPOLINE = re.compile(
    rb"#!/bin/sh\n'''exec' \"?(?P<prefix>/[^\s\"]*)/bin/(?P<python>python[0-9.]*)\"?"
    rb"(?P<options>[^\n\"]*)\"\$0\" \"\$@\"(?: #'''|\n' ''')\n"
)
_START = re.compile(rb"#![^\n]*\n('''exec' [^\n]*(#'''|\n' ''')\n)?")
NO_USER_SITE = b"-s"
_FUTURE = re.compile(rb"^from[ \t]+__future__[ \t]+import\b", re.MULTILINE)


@dataclass(frozen=True)
class Shebang:
    """`#!PREFIX/bin/PYTHON OPTIONS`."""

    prefix: bytes
    python: bytes
    options: bytes = b""


def read(script: bytes) -> Shebang | None:
    """The start of a script, if it names the path of a python: a first line, or a call from sh."""
    found = _PYTHON.match(script) or _TRAMPOLINE.match(script)
    if found is None:
        return None
    return Shebang(found["prefix"], found["python"], (found["options"] or b"").strip())


def without_start(script: bytes) -> bytes:
    """The script without its start."""
    return _START.sub(b"", script, count=1)


def start(shebang: Shebang, code: bytes) -> tuple[bytes, str]:
    """The start for `code`, and why it is the plain path; "" for a start that any kernel runs."""
    interpreter = shebang.prefix + b"/bin/" + shebang.python
    if reason := _must_stay_first(code):
        return b"#!" + interpreter + b" " + _as_one_word(shebang.options) + b"\n", reason
    return trampoline(interpreter, b" ".join(filter(None, (NO_USER_SITE, shebang.options)))), ""


def _as_one_word(options: bytes) -> bytes:
    """`-s` and the options: the kernel passes all text after the path as one argument."""
    if not options or options.startswith(b"--"):  # a long option cannot be combined
        return options or NO_USER_SITE
    return NO_USER_SITE + options[1:].replace(b" -", b"")


def trampoline(interpreter: bytes, options: bytes = b"") -> bytes:
    """First lines of a Python script with a path of any length: sh runs them, Python skips them."""
    options = b" " + options if options else b""
    return b"#!/bin/sh\n'''exec' \"" + interpreter + b'"' + options + b" \"$0\" \"$@\"\n' '''\n"


def _must_stay_first(code: bytes) -> str:
    if _FUTURE.search(code):
        # A syntax error after two strings: the lines for sh, and a docstring.
        return "it has a `from __future__ import`"
    try:
        code.decode()
    except UnicodeDecodeError:
        return "it is not UTF-8"  # Python reads an encoding only in the first two lines
    return ""
