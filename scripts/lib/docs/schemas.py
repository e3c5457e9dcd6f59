"""The JSON schemas in docs/schemas: what each command prints with `--json`."""

from __future__ import annotations

import json
from typing import Any

from scripts.lib.docs.links import ROOT

FOLDER = ROOT / "docs/schemas"


def load(name: str) -> dict[str, Any]:
    """The schema with this name, such as `stage/verify`."""
    schema: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text("utf-8"))
    return schema


def table() -> str:
    """Each schema with its title and its keys."""
    rows = []
    for path in sorted(FOLDER.rglob("*.json")):
        name = path.relative_to(FOLDER).with_suffix("").as_posix()
        schema = load(name)
        keys = ", ".join(f"`{key}`" for key in schema["properties"])
        about = schema["description"]
        rows.append(f"| [{schema['title']}](../schemas/{name}.json) | {about} | {keys} |")
    return "\n".join(["| command | what it prints | keys |", "|---|---|---|", *rows])
