"""The options of `scripts/bench`. Imports no library: the script parses before it installs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
AREAS = {
    "stage": ("fetch", "verify", "serve"),
    "env": ("environment",),
    "runner": ("training",),
}


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Reads the options; ends with exit code 2 and a message for wrong ones, with 0 for --help."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench",
        description="Measures Airlift beside other tools, on this machine. stage: fetches from a "
        "Hub on loopback, verifies, serves (beside nginx where it is installed). runner: trains "
        "and prepares on CPUs. env: creates an environment, imports from it.",
        epilog="The other tools get a virtual environment in the folder (16 GB of disk). Results "
        "go to the folder. Linux only.",
    )
    parser.add_argument("area", choices=list(AREAS))
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help="of stage: fetch, verify, serve; default: all"
    )
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "output/scripts-bench", help="default: %(default)s"
    )
    parser.add_argument("--record", action="store_true", help="write docs/benchmarks.md too")
    options = parser.parse_args(arguments)
    known = AREAS[options.area]
    if unknown := set(options.parts) - set(known):
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    if not Path("/proc/self/smaps_rollup").exists():
        parser.error("memory is read from /proc/*/smaps_rollup, which only Linux has")
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    return options


if __name__ == "__main__":
    parse(sys.argv[1:])
