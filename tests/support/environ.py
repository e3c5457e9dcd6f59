"""Variables of the process that runs the tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def kept_environment() -> Iterator[None]:
    """Afterwards all variables are as before: a command in this process sets some of its own."""
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
