"""Writes the generated blocks of the pages again, between `<!-- generated: NAME -->` and an end."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from scripts.lib.docs import commands, formats
from scripts.lib.docs.links import pages

BLOCKS: dict[str, Callable[[], str]] = {
    "commands of stage": commands.of_stage,
    "commands of runner": commands.of_runner,
    "decisions": formats.decisions,
    "exit codes": formats.exit_codes,
    "keys of manifests": formats.manifest_keys,
    "keys of run files": formats.run_file_keys,
    "lock": formats.lock,
    "python api": formats.python_api,
}
_BLOCK = re.compile(r"(<!-- generated: ([a-z ]+)[^>]*-->\n).*?(<!-- end -->)", re.DOTALL)


def stale() -> Iterator[tuple[Path, str]]:
    """Yields each page whose blocks differ from the code, with the text that it should have."""
    for page in pages():
        text = page.read_text("utf-8")
        new = _BLOCK.sub(lambda found: f"{found[1]}\n{BLOCKS[found[2]]()}\n\n{found[3]}", text)
        if new != text:
            yield page, new


def used() -> set[str]:
    """The blocks that pages have."""
    return {found[2] for page in pages() for found in _BLOCK.finditer(page.read_text("utf-8"))}
