"""Answers that took seconds to find, kept in the user's state folder for the next command.

An answer is kept under a digest of all that it follows from, so none is ever out of date. It is
only there to save time: a folder that cannot be written or read changes nothing else.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from runner.from_stage import __version__, state_folder, write_atomically


def versions(*packages: str) -> list[str]:
    """Returns the installed versions of packages; empty for one that is not installed."""
    found = []
    for package in packages:
        try:
            found.append(version(package))
        except PackageNotFoundError:
            found.append("")
    return found


def path_of(kind: str, *basis: object) -> Path:
    """The file of an answer.

    Args:
        kind: the folder, such as `memory`.
        basis: all that the answer follows from; this version of airlift is added.
    """
    text = json.dumps([__version__, basis], sort_keys=True, default=str)
    name = hashlib.sha256(text.encode()).hexdigest()[:32]
    return state_folder(os.environ) / kind / f"{name}.json"


def read(path: Path) -> Any:
    """Returns the answer; None: there is none."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None


def keep(path: Path, answer: object) -> None:
    """Writes an answer, if the folder can be written."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(answer).encode())
