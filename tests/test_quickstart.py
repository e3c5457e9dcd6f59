"""The links of the README and of its translations; its lines, for tests."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
TRANSLATIONS = [ROOT / "docs" / f"README.{name}.md" for name in ("zh-CN", "ru")]
PAGES = [README, *TRANSLATIONS]


def code(page: Path) -> list[tuple[str, str]]:
    """(command, comment) of each line of the page's code blocks."""
    lines = re.findall(r"^    (\S.*|  \S.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    parts = [line.strip().partition("  #") for line in lines]
    return [(command.strip(), comment.strip()) for command, _, comment in parts]


def links(page: Path) -> list[str]:
    """Where the links and pictures of the page lead, from the root of the checkout."""
    found = []
    for link in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        place = link if "://" in link else os.path.relpath(page.parent / link, ROOT)
        found.append(place)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    found = links(page)
    assert len(found) > 15
    assert [link for link in found if "://" not in link and not (ROOT / link).exists()] == []
