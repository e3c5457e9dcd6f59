"""Writes the goldens: `python -m tests.golden.record [NAME...]`, without a name all of them.

Each golden has a module in this folder with `record(folder)`, which returns the text of its file.
`folder` is an empty one to work in. Tests call the same function and compare.
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
# Name -> (module with `record`, file that it writes)
GOLDENS: dict[str, tuple[str, str]] = {
    "plan": ("tests.golden.plan", "plan.json"),
    "ranks": ("tests.golden.ranks", "ranks.json"),
    "outcome": ("tests.golden.outcome", "outcome.json"),
    "bundle": ("tests.golden.bundle", "bundle.json"),
    "served": ("tests.golden.served", "served.jsonl"),
    "verdicts": ("tests.golden.verdicts", "verdicts.jsonl"),
    "asked": ("tests.golden.asked", "asked.txt"),
}


def record(name: str, folder: Path) -> str:
    """Returns the text of a golden as the product answers now."""
    text: str = importlib.import_module(GOLDENS[name][0]).record(folder)
    return text


def path_of(name: str) -> Path:
    return FOLDER / GOLDENS[name][1]


def main(names: list[str]) -> None:
    for name in names or GOLDENS:
        with tempfile.TemporaryDirectory() as work:
            os.environ["XDG_STATE_HOME"] = str(Path(work) / "state")
            os.environ["AIRLIFT_STORE"] = "none"
            folder = Path(work) / name
            folder.mkdir()
            path_of(name).write_text(record(name, folder), encoding="utf-8")
        print(f"{path_of(name).relative_to(Path.cwd())}: {path_of(name).stat().st_size:,} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
