"""The record of a check of a machine's devices: JSON after every item, and a Markdown table.

The JSON file has `format`, `machine` (the key of what was measured: another machine or other
versions begin another record) and `items`, each an `Item`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from runner.errors import UsageError, write_atomically

FORMAT = 1
JSON, MARKDOWN = "gpu-check.json", "gpu-check.md"

Status = Literal["ok", "failed", "not run"]


@dataclass(frozen=True)
class Item:
    """The result of one item.

    Attributes:
        name: `facts`, `matmul`, `speed bert-large-512 ddp eager`, ...
        status: `not run` is tried again by the next call; the others stay.
        seconds: wall time.
        values: name with unit -> value: `bf16 TFLOP/s`, `peak GiB`.
        note: why it failed or was not run.
    """

    name: str
    status: Status
    seconds: float = 0.0
    values: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""


class Record:
    """The items that are known, on the disk after each `put`.

    Args:
        folder: holds the two files; made if it is missing.
        machine: what the measurements depend on: device, versions, commit.

    Raises:
        UsageError: the folder holds the record of another machine or of other versions.
    """

    def __init__(self, folder: Path, machine: Mapping[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._machine = folder, dict(machine)
        self.items: dict[str, Item] = {}
        path = folder / JSON
        if not path.exists():
            return
        before = read(path)
        differing = [key for key in self._machine if before["machine"].get(key) != machine[key]]
        if differing:
            key = differing[0]
            raise UsageError(
                f"{path} is the record of another machine or version: {key} was "
                f"{before['machine'].get(key)!r} and is {machine[key]!r}.",
                "Name another folder, or remove this one.",
            )
        self.items = {entry["name"]: Item(**entry) for entry in before["items"]}

    def is_done(self, name: str) -> bool:
        """Whether an item has a result."""
        return name in self.items and self.items[name].status != "not run"

    def put(self, item: Item) -> None:
        """Adds or replaces an item, and writes both files."""
        self.items[item.name] = item
        document = {
            "format": FORMAT,
            "machine": self._machine,
            "items": [asdict(each) for each in self.items.values()],
        }
        text = json.dumps(document, indent=1, ensure_ascii=False) + "\n"
        write_atomically(self._folder / JSON, text.encode())
        page = markdown(self._machine, list(self.items.values()))
        write_atomically(self._folder / MARKDOWN, page.encode())


def read(path: Path) -> dict[str, Any]:
    """Reads a record.

    Raises:
        UsageError: it is not one.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["format"] == FORMAT and isinstance(document["machine"], dict):
            return dict(document)
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise UsageError(f"{path} is not a record of gpu-check.", "Name another folder.")


def markdown(machine: Mapping[str, Any], items: list[Item]) -> str:
    """The record as a page of Markdown. Pure."""
    about = "; ".join(f"{key}: {value}" for key, value in machine.items())
    lines = [
        f"# GPU check\n\n{about}.\n",
        "| item | result | seconds | values |",
        "|---|---|---:|---|",
    ]
    for item in items:
        shown = ", ".join(f"{name} {_shown(value)}" for name, value in item.values.items())
        note = f"{item.note} " if item.note else ""
        cells = (item.name, item.status, f"{item.seconds:.0f}", f"{note}{shown}")
        lines.append(f"| {' | '.join(_cell(cell) for cell in cells)} |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "/").split())


def _shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
