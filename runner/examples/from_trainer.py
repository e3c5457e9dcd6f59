"""TrainingArguments of a JSON file in the blocks of a new run file: `runner init --from`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from runner.config.theirs import trainer
from runner.config.theirs.found import Found, nested
from runner.errors import as_shown

_INSTEAD = {"steps": "epochs", "epochs": "steps"}
_OF_THE_EXAMPLE = ("lora", "quantization")
"""What the example has and TrainingArguments never say."""


def adapt(blocks: dict[str, str], source: Path, path: Path) -> tuple[str, list[str], list[str]]:
    """Writes what the arguments say into the blocks of a run file.

    Args:
        blocks: key of the run file -> its lines; changed.
        source: the JSON file.
        path: the run file that will be written.

    Returns:
        Comments for the head of the run file, lines that explain it, and what is left out.

    Raises:
        UsageError: the arguments cannot be read, or ask for what is not here.
    """
    data = trainer.load(source)
    found = trainer.read(data, source)
    _put_deepspeed(found, data.get("deepspeed"), source, path)
    for key in _OF_THE_EXAMPLE:
        if blocks.pop(key, None):
            found.left_out[key] = f"the example for this task has it, {source.name} says nothing"
    for key, value in nested(found.values).items():
        blocks.pop(_INSTEAD.get(key, ""), None)
        reasons = [
            reason for name, reason in found.reasons.items() if name.partition(".")[0] == key
        ]
        comment = as_shown("; ".join(dict.fromkeys(reasons)))
        block = f"{key}: {flow(value)}   # {comment}\n"
        blocks[key] = block
    blocks["slurm"] = blocks.pop("slurm")  # it stays the last
    said = [
        f"{key}: {flow(value)} (from {source.name}, {found.reasons[key]})"
        for key, value in found.values.items()
    ]
    left = [f"{what}: left out; {why}" for what, why in found.left_out.items()]
    head = [f"# Not in this file, from {source.name}:"] if left else []
    head += [f"#   {' '.join(as_shown(line).split())}" for line in left]
    return "".join(f"{line}\n" for line in head), said, left


def _put_deepspeed(found: Found, settings: object, source: Path, path: Path) -> None:
    """Refers to the user's ds_config.json; where it is part of the arguments, it is written."""
    if isinstance(settings, str):
        theirs = (source.parent / settings).resolve()
        found.values["engine.config"] = str(theirs)
    elif isinstance(settings, dict) and settings:
        theirs = path.with_suffix(".ds_config.json")
        theirs.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        found.take("engine.config", theirs.name, "deepspeed", "{...}, written to this file")


def flow(value: Any) -> str:
    """A value as YAML on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {flow(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(flow, value)) + "]"
    if isinstance(value, str) and value.replace("_", "").isalnum():
        return value
    return json.dumps(value)
