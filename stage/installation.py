"""How this copy of Airlift was installed, and so which command adds one of its extras.

The name of the distribution alone does not help: on the public index it is another program.
"""

from __future__ import annotations

import json
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from stage.errors import UsageError, quoted

DISTRIBUTION = "airlift-hpc"
TEMPLATES = Path(__file__).resolve().parent / "templates"
"""The folder of the shell scripts that run in and beside environments."""
TO_FETCH = ("huggingface_hub", "urllib3", "truststore", "pyarrow")
"""Libraries for `check_libraries`: of all commands that ask a Hub."""


def install_command(extra: str = "") -> str:
    """The command that adds an extra to this copy of Airlift, or installs this copy again.

    Args:
        extra: a key of `[project.optional-dependencies]`, such as "train"; empty: none.

    Returns:
        A line for a shell: with the source that pip recorded (PEP 610, `direct_url.json`) while it
        is there, else for the checkout. In an environment that was made from a bundle, a sentence:
        nothing can be added to it there.
    """
    from importlib import metadata  # half as long as all other imports of a short command

    if is_from_bundle(Path(sys.prefix)):
        return (
            f"{sys.prefix} was made from a bundle. On the laptop, add what is missing to its "
            "environment file, then: stage env lock, stage fetch"
        )
    in_brackets = f"[{extra}]" if extra else ""
    source = None
    # Without a source, or with one that is not as PEP 610 says, there is still a remedy.
    with suppress(metadata.PackageNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        recorded = metadata.distribution(DISTRIBUTION).read_text("direct_url.json")
        source = _of_source(json.loads(recorded or ""), in_brackets)
    if source:
        return f"pip install {source}"
    return f"pip install '.{in_brackets}', in the checkout of airlift"


def check_libraries(what: str, *names: str, extra: str = "laptop") -> None:
    """Checks that libraries of an extra are installed and new enough, before an import.

    transformers 4, beside which Airlift may be installed, brings a huggingface_hub that is too old.

    Args:
        what: the work that needs them, such as "stage fetch".
        names: the names of their distributions.

    Raises:
        UsageError: one is missing or too old; the remedy installs the extra.
    """
    from importlib import metadata

    try:
        stated = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:  # it runs from a folder
        stated = []
    problems = []
    for name in names:
        least = _bound(stated, name, extra)
        try:
            installed = metadata.version(name)
        except metadata.PackageNotFoundError:
            problems.append(f"{name} (not installed)")
            continue
        if _numbers(installed) < _numbers(least):
            problems.append(
                f"{name} {least} or newer (installed: {installed}; where something else pins that, "
                "use an environment of its own: python3 -m venv)"
            )
    if problems:
        raise UsageError(f"{what} needs {', '.join(problems)}.", install_command(extra))


def _bound(stated: list[str], name: str, extra: str) -> str:
    """The lowest version of a library that an extra allows; empty: any. Pure."""
    for requirement in stated:
        text, _, marker = requirement.partition(";")
        found = re.match(rf"\s*{re.escape(name)}\b.*>=\s*([\d.]+)", text)
        if found and extra in marker:
            return found[1]
    return ""


def _numbers(version: str) -> list[int]:
    """`2.5rc1` -> [2, 5]."""
    found = re.match(r"\d+(\.\d+)*", version)
    return [int(number) for number in found[0].split(".")] if found else []


def is_from_bundle(prefix: Path) -> bool:
    """Whether an environment was made from a bundle: its image holds its own description."""
    return (prefix / ".airlift" / "env.json").is_file()


def _of_source(recorded: dict[str, Any], extra: str) -> str | None:
    """What pip recorded, as its arguments; None: the folder or the file is gone."""
    url = str(recorded["url"])
    parts = urlsplit(url)
    if parts.scheme != "file":
        vcs = recorded.get("vcs_info")
        url = f"{vcs['vcs']}+{url}@{vcs['commit_id']}" if vcs else url
        return quoted(f"{DISTRIBUTION}{extra} @ {url}")
    path = Path(unquote(parts.path))
    if not path.exists():
        return None
    option = "-e " if recorded.get("dir_info", {}).get("editable") else ""
    return f"{option}'{path}{extra}'"
