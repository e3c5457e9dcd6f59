"""Keeps two voices apart: what Airlift tells people, and what the libraries print.

While a rank works, file descriptors 1 and 2 lead into its log, so that DeepSpeed's lines, Python's warnings and what
C++ prints end up there; `Console` holds where they led before.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO


@dataclass(frozen=True)
class Console:
    """The streams this process was started with."""

    out: TextIO
    err: TextIO

    def say(self, text: str) -> None:
        """A line for people."""
        print(text, file=self.out, flush=True)


@contextlib.contextmanager
def open_console(log: Path) -> Iterator[Console]:
    """Sends everything printed into `log` (appended); yields the way to the people outside."""
    _flush()
    kept = os.dup(1), os.dup(2)
    with os.fdopen(kept[0], "w", buffering=1) as out, os.fdopen(kept[1], "w", buffering=1) as err:
        with open(log, "ab", buffering=0) as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        try:
            yield Console(out, err)
        finally:
            _flush()
            os.dup2(kept[0], 1)
            os.dup2(kept[1], 2)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
