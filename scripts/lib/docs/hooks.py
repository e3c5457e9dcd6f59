"""What mkdocs needs to read the pages as a code host does."""

from __future__ import annotations

import re
from typing import Any

from scripts.lib.docs.links import LINK, ROOT, slug

DOCS = ROOT / "docs"
_LIST_AFTER_TEXT = re.compile(
    r"^((?!\s*(?:[-*]|\d+\.) |\s*$|#|\|).*\n)(?=(?:-|\d+\.) )", re.MULTILINE
)


def slugify(heading: str, separator: str, **_more: Any) -> str:
    """The anchor of a heading."""
    return slug(heading)


def on_page_markdown(markdown: str, page: Any, config: Any, **_more: Any) -> str:
    """Fixes what Markdown dialects read differently, and links that lead out of docs/."""
    folder = (DOCS / page.file.src_uri).parent
    url = config["extra"].get("repository", "")

    def link(found: re.Match[str]) -> str:
        picture, text, target = found.groups()
        path = (folder / target.partition("#")[0]).resolve()
        if re.match(r"\w+:|#", target) or (path.is_relative_to(DOCS) and path.is_file()):
            return found[0]
        if path.is_relative_to(DOCS / "adr"):
            there = "../" * page.file.src_uri.count("/") + "explanation/decisions.md"
            return f"[{text}]({there})"
        if not url:
            return text
        return f"{picture}[{text}]({url}/blob/HEAD/{path.relative_to(ROOT).as_posix()})"

    return _LIST_AFTER_TEXT.sub(r"\1\n", LINK.sub(link, markdown))
