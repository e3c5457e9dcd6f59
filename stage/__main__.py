"""The `stage` command, and `python -m stage`; and how `runner` begins, too."""

from __future__ import annotations

import os
import sys
from importlib import import_module


def main() -> None:
    """Runs the command."""
    start("stage")


def start(program: str) -> None:
    """Runs a command.

    A failed import (also for lack of memory) ends with exit code 5. Python's own exit code 1 would
    mean that damage was found.

    Args:
        program: `stage` or `runner`.
    """
    if os.name == "nt":  # no signals, no locks and no shared ssh connections as here
        sys.stderr.write("error: airlift does not run in Windows itself.\n")
        sys.stderr.write("  -> wsl --install; then install airlift in the Linux that it brings.\n")
        sys.exit(2)
    try:
        run = import_module(f"{program}.cli").main
    except KeyboardInterrupt:
        sys.stderr.write("error: Interrupted.\n  -> Run the same command again.\n")
        sys.exit(5)
    except Exception as error:  # noqa: BLE001 - any kind of failure
        sys.stderr.write(f"error: {program} could not start: {type(error).__name__}: {error}\n")
        remedy = "Look at `ulimit -v` and at how airlift is installed; then run it again."
        if home := os.environ.get("PYTHONHOME"):
            remedy = f"unset PYTHONHOME: it names another Python's library, {home}."
        sys.stderr.write(f"  -> {remedy}\n")
        sys.exit(5)
    run()


if __name__ == "__main__":
    main()
