"""What a command asked for and its bundle does not have: entries of a manifest, kept by the job.

`runner status` shows them. `runner check --add` writes them into the manifest.
"""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from runner.from_stage import UsageError, write_atomically

_ENTRY = re.compile(r"^  (?P<name>\S.*):$(?:\n    .*)*", re.MULTILINE)
_ASSETS = re.compile(
    r"^assets:[ \t]*(?:#.*)?\n(?=(?:[ \t]*(?:#.*)?\n)*(?P<margin> *))", re.MULTILINE
)
"""The line before the entries, and the margin of the first one."""


def missing_of(path: Path) -> str:
    """What the command asked for and the bundle does not have, as entries of a manifest; each once.

    Each node of the job writes them.
    """
    try:
        return entries_in(path.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return ""


def entries_in(text: str) -> str:
    """The entries in what the nodes of a job wrote, each once."""
    return "\n".join(dict.fromkeys(found[0] for found in _ENTRY.finditer(text)))


def add_to_manifest(missing: str, manifest: Path) -> list[str]:
    """Writes entries below `assets:` of a manifest, whose other text stays as it is.

    Args:
        missing: of `missing_of`.

    Returns:
        The names of the assets that were added: those that it did not have.

    Raises:
        UsageError: the manifest has no place for them that can be written to.
    """
    text = manifest.read_text(encoding="utf-8")
    text += "\n" * (not text.endswith("\n"))
    known = (yaml.safe_load(text) or {}).get("assets") or {}
    new = {
        name: entry
        for name, entry in yaml.safe_load(missing).items()
        if name not in known and entry not in known.values()
    }
    if not new:
        return []
    odd = [name for name, entry in new.items() if not _is_asked_of_a_hub(entry)]
    if odd:
        raise UsageError(
            f"{manifest}: nothing was added: no job asks for an entry such as `{odd[0]}`.",
            "It may be a trick: `path:` and `url:` would send what is on this machine, and "
            "`allow_code:` lets code run. Write by hand what you want.",
        )
    block = _ASSETS.search(text)
    margin = (block["margin"] if block else "") or "  "
    written = [
        "\n".join(margin + line[2:] for line in found[0].splitlines()) + "\n"
        for found in _ENTRY.finditer(missing)
        if found["name"].strip("\"'") in map(str, new)
    ]
    end = block.end() if block else 0
    changed = text[:end] + "".join(written) + text[end:]
    if block is None or _assets(changed) != {**known, **new}:
        raise UsageError(
            f"{manifest}: its `assets:` is not written as a list of lines, so nothing was added.",
            f"Add by hand:\n{missing}",
        )
    write_atomically(manifest, changed.encode())
    return list(map(str, new))


def _is_asked_of_a_hub(entry: object) -> bool:
    """Whether an entry names a repository, as the bundle's Hub writes it; a job may write more."""
    if not isinstance(entry, dict):
        return False
    allowed = {"model", "dataset", "metric", "include"}
    return entry.keys() <= (allowed | {"allow_code"} if "metric" in entry else allowed)


def _assets(text: str) -> object:
    try:
        return yaml.safe_load(text)["assets"]
    except (yaml.YAMLError, TypeError, KeyError):
        return None
