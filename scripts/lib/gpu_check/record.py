"""The record of a check of a machine's GPUs: `gpu-check.json`, written after every item.

`machine` is what the results depend on: another machine or other versions begin another record.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from runner.from_stage import UsageError, write_atomically

Status = Literal["ok", "failed", "not run"]


@dataclass(frozen=True)
class Item:
    """The result of one item.

    Attributes:
        name: `node`, `tests`, `bench bert-large-512 ddp`, ...
        status: `not run` is tried again by the next call; the others stay.
        seconds: wall time.
        values: name -> value: `tokens_per_s`, `memory_gib`.
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
        folder: holds the file; made if it is missing.
        machine: what the measurements depend on: device, versions.

    Raises:
        UsageError: the folder holds the record of another machine or of other versions.
    """

    def __init__(self, folder: Path, machine: Mapping[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path, self._machine = folder / "gpu-check.json", dict(machine)
        self.items: dict[str, Item] = {}
        if self.path.exists():
            before = json.loads(self.path.read_text(encoding="utf-8"))
            if before["machine"] != self._machine:
                raise UsageError(
                    f"{self.path} is the record of another machine or version: "
                    f"{before['machine']}; this is {self._machine}.",
                    "Name another folder, or remove this one.",
                )
            self.items = {entry["name"]: Item(**entry) for entry in before["items"]}

    def is_done(self, name: str) -> bool:
        """Whether an item has a result."""
        return name in self.items and self.items[name].status != "not run"

    def put(self, item: Item) -> None:
        """Adds or replaces an item, and writes the file."""
        self.items[item.name] = item
        items = [asdict(each) for each in self.items.values()]
        text = json.dumps({"format": 1, "machine": self._machine, "items": items}, indent=1)
        write_atomically(self.path, f"{text}\n".encode())
