"""Checks the links of the pages, as a code host reads them: files, folders and anchors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]

_FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"^(?: {4}|\t).*$", re.MULTILINE)
_CODE = re.compile(r"(`+)(?!`).*?(?<!`)\1(?!`)", re.DOTALL)
LINK = re.compile(r"(!?)\[((?:[^][]|\[[^]]*\])*)\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#{1,6} +(.*?) *$", re.MULTILINE)
_ELSEWHERE = re.compile(r"\w+:")


def pages() -> list[Path]:
    """README.md and all pages of docs/."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def broken() -> Iterator[str]:
    """Yields a line for each link that leads nowhere: "FILE: `TARGET`: reason"."""
    for page in pages():
        text = _CODE.sub("", _INDENTED.sub("", _FENCE.sub("", page.read_text("utf-8"))))
        for found in LINK.finditer(text):
            if not _ELSEWHERE.match(found[3]) and (reason := _reason(page, found[3])):
                yield f"{page.relative_to(ROOT)}: `{found[3]}`: {reason}"


def _reason(page: Path, target: str) -> str:
    """Why a link leads nowhere; empty if it leads somewhere."""
    path, _, anchor = target.partition("#")
    file = (page.parent / path).resolve() if path else page
    if not file.exists():
        return "there is no such file"
    if anchor and anchor not in anchors(file):
        return "the page has no such heading"
    return ""


@cache
def anchors(page: Path) -> frozenset[str]:
    """The anchors of a page: its headings, and `<a id="...">`."""
    if page.suffix != ".md":
        return frozenset()
    text = _FENCE.sub("", page.read_text("utf-8"))
    headings = (slug(found[1]) for found in _HEADING.finditer(text))
    return frozenset([*headings, *re.findall(r'<a id="([^"]+)"', text)])


def slug(heading: str) -> str:
    """The anchor that a code host gives to a heading."""
    words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")
