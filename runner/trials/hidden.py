"""The folder of a rehearsal: beside the run folder, on the same disk, gone afterwards."""

from __future__ import annotations

import os
import platform
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from runner.processes import is_alive

TRIES, PAUSE_S = 50, 0.1
"""Ranks that are being killed may still write for a moment."""


@contextmanager
def hidden_folder(run_folder: Path) -> Iterator[Path]:
    """Makes a folder beside the run folder, and removes it however the block ends.

    Folders above it that had to be made are removed too, and what killed rehearsals left.

    Args:
        run_folder: need not exist.

    Raises:
        OSError: it cannot be made.
    """
    prefix = f".{run_folder.name}.rehearsal-{platform.node()}-"
    _remove_abandoned(run_folder.parent, prefix)
    folder = run_folder.parent / f"{prefix}{os.getpid()}"
    made = [above for above in folder.parents if not above.exists()]
    try:
        folder.mkdir(mode=0o700, parents=True)
        yield folder
    finally:
        _remove(folder)
        for above in made:  # the innermost first
            with suppress(OSError):  # something else is in it now
                above.rmdir()


def _remove(folder: Path) -> None:
    for _ in range(TRIES):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(PAUSE_S)


def _remove_abandoned(parent: Path, prefix: str) -> None:
    """Removes what rehearsals of this machine left that were killed."""
    for left in parent.glob(f"{prefix}*"):
        process = left.name.removeprefix(prefix)
        if process.isdecimal() and not is_alive(int(process)):
            _remove(left)
