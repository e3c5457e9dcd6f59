"""The list of errors: every message with its exit code and its remedy, by topic."""

from __future__ import annotations

import importlib
import re
from itertools import groupby

from scripts.lib.docs.commands import plain
from scripts.lib.docs.messages import messages


def of_stage() -> str:
    """The messages of `stage`."""
    return _list("stage")


def of_runner() -> str:
    """The messages of `runner`."""
    return _list("runner")


def _list(package: str) -> str:
    lines = []
    own = [item for item in messages() if item.folder.split("/")[0] == package]
    for folder, items in groupby(own, key=lambda item: item.folder):
        lines += [f"## {_title(folder)}", ""]
        for item in items:
            lines += [
                f"- {plain(item.text)} *(exit code {item.code})*  ",
                f"  **Remedy:** {_remedy(item.remedy)}",
            ]
        lines.append("")
    return "\n".join(lines).strip()


def _title(folder: str) -> str:
    """`stage fetch`: and what the package says it does."""
    name = folder.replace("/", ".")
    about = (importlib.import_module(name).__doc__ or "").strip().partition("\n")[0]
    topic = folder.partition("/")[2].replace("_", " ")
    about = about.partition(": ")[2] or about
    return f"{topic[0].upper()}{topic[1:]}: {about.rstrip('.')}" if topic else "In general"


def _remedy(text: str) -> str:
    if not text:
        return "the message has it."
    if not re.search("[a-z]{2}", text):
        return "it depends on the case; the command prints it."
    return plain(text)
