"""What an adapter was trained on: pure rules on its adapter_config.json (peft)."""

from __future__ import annotations

import json
import re

from stage.asset import Base

CONFIG = "adapter_config.json"


def base_of(text: bytes) -> tuple[Base | None, str | None]:
    """The Hub repository an adapter needs, and what else it names where that is none.

    Returns:
        The base, or None; a text that names no Hub repository (a path on its author's disk), or None.
    """
    try:
        config = json.loads(text)
    except (ValueError, RecursionError):  # the load test will say so
        return None, None
    name = config.get("base_model_name_or_path") if isinstance(config, dict) else None
    if not isinstance(name, str) or not name:
        return None, None
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name) or ".." in name:
        return None, name
    revision = config.get("revision")
    return Base(name, revision if isinstance(revision, str) and revision else "main"), None
