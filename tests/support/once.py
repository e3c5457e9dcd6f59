"""What is dear to make and only looked at: made once for all workers of a test run."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """A folder that `make` fills the first time anybody asks for it; the other workers wait. Treat it as read-only.

    Args:
        make: gets the folder, which is there and empty. What it raises reaches whoever asked, and the next one to ask
            tries again in another folder.
    """
    base = factory.getbasetemp()
    shared = (base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base) / "once"
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
