"""The quick starts in other languages give the README's commands, and link to what is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
QUICKSTARTS = sorted((ROOT / "docs").glob("quickstart.*.md"))


@pytest.mark.parametrize("page", QUICKSTARTS, ids=lambda page: page.stem)
def test_every_command_is_one_of_the_readme(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    commands = re.findall(r"^    (.+)$", text, re.MULTILINE)
    assert len(commands) > 8
    assert [line for line in commands if line not in README] == []
    english = README + "".join(
        (ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("stage.md", "runner.md")
    )
    named = re.findall(r"`((?:stage|runner|sh) [^`]+)`", text)
    assert named and [words for words in named if words not in english] == []


@pytest.mark.parametrize("page", [ROOT / "README.md", *QUICKSTARTS], ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8"))
    assert links
    assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []


def test_the_readme_names_every_quick_start() -> None:
    assert QUICKSTARTS and all(f"docs/{page.name}" in README for page in QUICKSTARTS)
