"""A card of the Hub (README.md) as its YAML, between two lines of `---` at the top, and the text below."""

from __future__ import annotations

import re
from typing import Any

import yaml

_FRONT_MATTER = re.compile(r"\A(?:\ufeff)?---[ \t]*\r?\n(.*?)^---[ \t]*\r?$\n?", re.DOTALL | re.MULTILINE)


def split_card(card: str) -> tuple[dict[str, Any], str]:
    """The YAML's mapping and the text; an empty mapping where there is none that can be read."""
    match = _FRONT_MATTER.match(card)
    if not match:
        return {}, card
    try:
        metadata = yaml.safe_load(match[1])
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError):
        metadata = None
    return (metadata if isinstance(metadata, dict) else {}), card[match.end() :]
