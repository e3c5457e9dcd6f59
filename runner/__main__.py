"""The `runner` command, and `python -m runner`."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Runs the command.

    A failed import (for lack of memory, too) ends with exit code 5. Python's own 1 would mean that
    damage was found.
    """
    if os.name == "nt":  # no signals, no locks and no shared ssh connections as here
        sys.stderr.write("error: airlift does not run in Windows itself.\n")
        sys.stderr.write("  -> wsl --install; then install airlift in the Linux that it brings.\n")
        sys.exit(2)
    try:
        from runner.cli import main as run
    except KeyboardInterrupt:
        sys.stderr.write("error: Interrupted.\n  -> Run the same command again.\n")
        sys.exit(5)
    except Exception as error:  # noqa: BLE001 - an import can raise anything
        sys.stderr.write(f"error: runner could not start: {type(error).__name__}: {error}\n")
        remedy = "Look at `ulimit -v` and at how airlift is installed; then run it again."
        if home := os.environ.get("PYTHONHOME"):
            remedy = f"unset PYTHONHOME: it names another Python's library, {home}."
        sys.stderr.write(f"  -> {remedy}\n")
        sys.exit(5)
    run()


if __name__ == "__main__":
    main()
