"""Checks that the installed libraries are new enough to fetch with, before they are imported.

Airlift is installed beside the pins of people's scripts. transformers 4 brings huggingface_hub
0.x, which has neither the client nor the errors that `stage.hub` uses. So Airlift's own bounds
(`pyproject.toml`) are low, as a cluster needs, and this module has the bounds that only `fetch`,
`lock` and `init` need. `verify`, `apply`, `serve`, `runner` and the rest work with older ones.
"""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

from stage.errors import UsageError

LEAST = {
    "huggingface_hub": (2, 4),  # the oldest tested version; the first with httpx2
    "urllib3": (2, 0),
    "pyarrow": (14, 0),  # conversions: it can merge the schemas of several files
}
"""Library -> the oldest version to fetch with."""


def check_hub_library() -> None:
    """Checks the libraries; call it before the import of `stage.staging.sources.source`.

    Raises:
        UsageError: a library of `LEAST` is missing, or older.
    """
    for name, oldest in LEAST.items():
        try:
            found = version(name)
        except PackageNotFoundError:
            found = ""
        if is_enough(found, oldest):
            continue
        here = f"{name} {found}" if found else "none"
        here += ", as transformers 4 requires" if found and name == "huggingface_hub" else ""
        raise UsageError(
            f"This command needs {name} {oldest[0]}.{oldest[1]} or newer; this Python has {here}.",
            "Install airlift in its own Python environment for this (python3 -m venv); "
            "all other commands work here.",
        )


def is_enough(found: str, oldest: tuple[int, int]) -> bool:
    """Whether a version (`2.4.0`, `2.5rc1`, empty for none) is `oldest` or newer."""
    parts = re.match(r"(\d+)(?:\.(\d+))?", found)
    return parts is not None and (int(parts[1]), int(parts[2] or 0)) >= oldest
