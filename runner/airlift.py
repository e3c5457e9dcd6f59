"""The `airlift` command: `airlift stage ...` and `airlift runner ...`.

It is for machines where other programs have the names `stage` and `runner`.
"""

from __future__ import annotations

import sys

from runner.from_stage import __version__

USAGE = """\
Usage: airlift stage ...     makes, carries and verifies a bundle (the same as: stage ...)
       airlift runner ...    trains from a bundle (the same as: runner ...)

Each has --help. Where a message names the command `stage` or `runner`, write `airlift` before it.
"""


def main() -> None:
    """Runs one of the two commands, with the arguments that follow its name."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name == "stage":
        from stage.__main__ import main as run
    elif name == "runner":
        from runner.__main__ import main as run
    elif name == "--version":
        print(f"airlift, version {__version__}")
        return
    elif name in ("--help", "-h", "help"):
        print(USAGE, end="")
        return
    else:
        problem = f"no command `{name}`" if name else "no command given"
        print(
            f"error: {problem}\n  -> airlift stage, or airlift runner\n\n{USAGE}",
            end="",
            file=sys.stderr,
        )
        sys.exit(2)
    sys.argv[:2] = [f"airlift {name}"]  # the name that usage and --help print
    run()
