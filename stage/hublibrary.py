"""Whether the huggingface_hub that is installed can be asked for what lies on a Hub, told before it is imported.

Environments with transformers 4 hold huggingface_hub 0.x, which has neither the client nor the errors that
`stage.sources` goes by. `verify`, `apply`, `serve`, `runner` and the rest never ask a Hub and work there.
"""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

from stage.errors import UsageError

LEAST = (2, 4)  # tested from here on; the first with httpx2


def require_hub_library() -> None:
    """To be called before `stage.sources` is imported.

    Raises:
        UsageError: no huggingface_hub, or one older than `LEAST`.
    """
    try:
        found = version("huggingface_hub")
    except PackageNotFoundError:
        found = ""
    if is_enough(found):
        return
    here = f"huggingface_hub {found}, as transformers 4 wants it" if found else "none"
    raise UsageError(
        f"Asking a Hub needs huggingface_hub {LEAST[0]}.{LEAST[1]} or newer; this Python has {here}.",
        "Give airlift a Python environment of its own for this (python3 -m venv); every other command works here.",
    )


def is_enough(found: str) -> bool:
    """Whether a version (`2.4.0`, `2.5rc1`, empty for none) is `LEAST` or newer."""
    parts = re.match(r"(\d+)(?:\.(\d+))?", found)
    return parts is not None and (int(parts[1]), int(parts[2] or 0)) >= LEAST
