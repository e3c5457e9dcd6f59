"""The table of docs/real-scripts.md: what was seen when the scripts ran."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from scripts.lib.real_scripts.road import Result
from scripts.lib.real_scripts.scripts import Script

PAGE = Path(__file__).parents[3] / "docs" / "real-scripts.md"
BEGIN, END = "<!-- begin: scripts/real-scripts --record -->", "<!-- end -->"
HEAD = ["| Script | It asks for | Unchanged? |", "|---|---|---|"]


def record(results: Sequence[Result], page: Path = PAGE) -> None:
    """Writes the rows of these scripts; rows of other scripts stay.

    Raises:
        ValueError: the page has no place for the table.
    """
    text = page.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    old, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page}: no {BEGIN} ... {END}")
    rows = {_key(line): line for line in old.splitlines() if line.startswith("| [")}
    rows |= {_key(line): line for line in map(row, results)}
    ordered = sorted(rows.values(), key=lambda line: re.sub(r".*\((\S+)\).*", r"\1", line[:300]))
    lines = "\n".join([begin, *HEAD, *ordered, end])
    page.write_text(f"{before}{lines}{after}", encoding="utf-8")


def _key(line: str) -> str:
    return line.split("|")[1].strip()


def row(result: Result) -> str:
    """One line of the table."""
    script = result.script
    url = f"https://github.com/{script.repository}/blob/{script.commit}/{script.path}"
    name = f"[{script.repository.rpartition('/')[2]}: {script.command.split()[0]}]({url})"
    if result.works:
        seen = "yes, on two ranks"
    elif result.is_as_listed:
        seen = f"no: {script.in_the_way}"
    else:
        seen = f"no: ends in `{result.step}`"
    return f"| {name} | {asks_for(script)} | {seen} |"


def asks_for(script: Script) -> str:
    """What the script asks for, in words."""
    parts = [f"`{name}`" for name in (*script.models, *script.datasets)]
    parts += [f"metric `{name}`" for name in script.metrics]
    return ", ".join(parts) or "nothing of a Hub"
