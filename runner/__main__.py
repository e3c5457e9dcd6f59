"""The `runner` command, and `python -m runner`."""

from __future__ import annotations

import sys


def main() -> None:
    """Runs the command.

    A failed import (for lack of memory, too) ends with exit code 5. Python's own 1 would mean that
    damage was found.
    """
    try:
        from runner.cli import main as run
    except Exception as error:  # noqa: BLE001 - an import can raise anything
        sys.stderr.write(f"error: runner could not start: {type(error).__name__}: {error}\n")
        sys.stderr.write(
            "  -> Look at `ulimit -v` and at how airlift is installed; then run it again.\n"
        )
        sys.exit(5)
    run()


if __name__ == "__main__":
    main()
