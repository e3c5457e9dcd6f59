"""How a Python script of an environment starts, however long the path of its python. Pure.

Kernels before 5.1 cut a first line off after 127 bytes, and an environment's prefix may be longer. So sh starts the
script, and Python skips the lines that did: to it they are a string.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

LONGEST = 127
"""Bytes of a first line that any kernel reads."""

_PYTHON = re.compile(rb"#![ \t]*(?P<prefix>/\S*)/bin/(?P<python>python[0-9.]*)(?P<options>[ \t][^\n]*)?\n")
_START = re.compile(rb"#![^\n]*\n('''exec' [^\n]*#'''\n)?")  # the second line is how py-rattler has it
_FUTURE = re.compile(rb"^from[ \t]+__future__[ \t]+import\b", re.MULTILINE)


@dataclass(frozen=True)
class Shebang:
    """`#!PREFIX/bin/PYTHON OPTIONS`."""

    prefix: bytes
    python: bytes
    options: bytes = b""


def read(script: bytes) -> Shebang | None:
    """The first line of a script, if it is the path of a python."""
    found = _PYTHON.match(script)
    return Shebang(found["prefix"], found["python"], (found["options"] or b"").strip()) if found else None


def without_start(script: bytes) -> bytes:
    """The script's own code."""
    return _START.sub(b"", script, count=1)


def start(shebang: Shebang, code: bytes) -> tuple[bytes, str]:
    """What to write before `code`, and why it is the bare path; "" where any kernel starts it."""
    interpreter = shebang.prefix + b"/bin/" + shebang.python
    if reason := _must_stay_first(code):
        return b"#!" + interpreter + (b" " + shebang.options if shebang.options else b"") + b"\n", reason
    return trampoline(interpreter, shebang.options), ""


def trampoline(interpreter: bytes, options: bytes = b"") -> bytes:
    """First lines of a Python script that any kernel runs, however long the path: sh starts it, Python skips that."""
    options = b" " + options if options else b""
    return b"#!/bin/sh\n'''exec' \"" + interpreter + b'"' + options + b" \"$0\" \"$@\"\n' '''\n"


def _must_stay_first(code: bytes) -> str:
    if _FUTURE.search(code):
        return "it has a `from __future__ import`"  # a syntax error behind two strings: ours, and its docstring
    try:
        code.decode()
    except UnicodeDecodeError:
        return "it is not UTF-8"  # only the first two lines of a file can say what it is
    return ""
