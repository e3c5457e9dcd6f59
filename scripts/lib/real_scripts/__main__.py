"""`scripts/real-scripts`: see there."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

from scripts.lib.real_scripts.environment import make
from scripts.lib.real_scripts.road import Result, Road
from scripts.lib.real_scripts.scripts import read
from scripts.lib.real_scripts.sources import NoSource, Sources
from scripts.lib.real_scripts.table import record

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "airlift-real-scripts"


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/real-scripts")
    parser.add_argument("names", nargs="*", help="of scripts; all without names")
    parser.add_argument("--folder", type=Path, default=Path("output/real-scripts"))
    parser.add_argument("--record", action="store_true", help="write docs/real-scripts.md")
    arguments = parser.parse_args()
    found = read()
    try:
        chosen = found.named(tuple(arguments.names))
    except ValueError as error:
        parser.error(str(error))
    python = make(CACHE, found.packages)
    sources = Sources(CACHE)
    results = []
    for script in chosen:
        folder = (arguments.folder / script.name).resolve()
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        try:
            result = Road(script, found, folder, python).walk(sources)
        except NoSource as error:
            result = Result(script, "source", 1, str(error))
        print(_line(result), flush=True)
        results.append(result)
    if arguments.record:
        record([result for result in results if result.step != "source"])
    return int(not all(result.is_as_listed for result in results))


def _line(result: Result) -> str:
    name = result.script.name
    if result.works:
        more = f"\n{result.asked_for_more}" if result.asked_for_more else ""
        return f"{name}: works unchanged{more}"
    if result.is_as_listed:
        return f"{name}: ends in `{result.step}`, as the list says: {result.script.in_the_way}"
    return f"{name}: FAILED in `{result.step}` with {result.status}\n{result.last_words}"


if __name__ == "__main__":
    sys.exit(main())
