"""`scripts/docs`: see there."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from scripts.lib.docs import generate, links


def main() -> int:
    """Returns the exit code: 1 if a page is not current, or a link leads nowhere."""
    parser = argparse.ArgumentParser(prog="scripts/docs", description="Builds the docs site.")
    parser.add_argument("folder", nargs="?", type=Path, default=Path("output/site"))
    parser.add_argument("--write", action="store_true", help="write the generated parts again")
    parser.add_argument("--url", default="", metavar="ADDRESS", help="address of the repository")
    arguments = parser.parse_args()
    faults = 0
    for page, text in generate.stale():
        if arguments.write:
            page.write_text(text, encoding="utf-8")
            print(f"{page.relative_to(links.ROOT)}: written again")
        else:
            faults += 1
            print(f"error: {page.relative_to(links.ROOT)} differs from the code", file=sys.stderr)
            print("  -> scripts/docs --write", file=sys.stderr)
    for line in links.broken():
        faults += 1
        print(f"error: {line}", file=sys.stderr)
    if faults:
        return 1
    from scripts.lib.docs import site  # needs mkdocs-material

    return site.build(arguments.folder, arguments.url)


if __name__ == "__main__":
    sys.exit(main())
