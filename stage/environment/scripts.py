"""The shell scripts that ask a node about itself: `stage` runs the same ones that travel for nodes without it.

They live in `stage/templates`, need `sh` alone, and print for people; their exit code is the answer.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from stage.errors import UsageError

PROBE = "env-probe.sh"
CHECK = "env-check.sh"

_FOLDER = Path(__file__).resolve().parents[1] / "templates"


def script_path(name: str) -> Path:
    """Where a script lies."""
    return _FOLDER / name


def read_script(name: str) -> str:
    """The text of a script."""
    return script_path(name).read_text(encoding="utf-8")


def run_script(name: str, *arguments: str | Path, read: bool = False) -> subprocess.CompletedProcess[str]:
    """Runs a script to its end; what it prints goes where ours does, or with `read` into the result.

    Raises:
        UsageError: there is no `sh`.
    """
    command = ["sh", str(script_path(name)), *map(str, arguments)]
    try:
        return subprocess.run(
            command, stdout=subprocess.PIPE if read else None, text=True, errors="replace", check=False
        )
    except FileNotFoundError:
        raise UsageError(
            "There is no `sh` on PATH.", "PATH=$PATH:/usr/bin:/bin, then the same command again."
        ) from None
