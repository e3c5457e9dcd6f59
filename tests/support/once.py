"""Materials that are slow to make and only read: made once for all workers of a test run."""

from __future__ import annotations

import fcntl
from collections.abc import Callable
from pathlib import Path

import pytest


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """A folder that `make` fills when it is first needed; other workers wait. Read-only for tests.

    Args:
        factory: pytest's.
        name: of the materials.
        make: gets the new, empty folder. An exception reaches the caller. The next caller tries
            again in another folder.
    """
    base = factory.getbasetemp()
    shared = (base.parent if base.name.startswith("popen-") else base) / "once"
    shared.mkdir(exist_ok=True)
    ready = shared / f"{name}.ready"
    with open(shared / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not ready.exists():
            tries = len(list(shared.glob(f"{name}-*")))
            folder = shared / f"{name}-{tries}"
            folder.mkdir()
            make(folder)
            ready.write_text(folder.name)
    return shared / ready.read_text()
