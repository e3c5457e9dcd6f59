"""The `runner` command, and `python -m runner`."""

from __future__ import annotations

from stage.__main__ import start


def main() -> None:
    """Runs the command; it begins as `stage` does."""
    start("runner")


if __name__ == "__main__":
    main()
