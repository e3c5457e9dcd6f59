"""Builds the site with mkdocs-material, strictly, and checks that no page needs another host."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from mkdocs.commands.build import build as build_site
from mkdocs.config import load_config
from mkdocs.exceptions import MkDocsException

_ASSET = re.compile(
    r"""<(?:script|img|iframe|source|video|audio)\b[^>]*\bsrc=["']?((?:https?:)?//[^"'\s>]+)|"""
    r"""<link\b(?![^>]*rel=["']?(?:canonical|next|prev))[^>]*\bhref=["']?((?:https?:)?//[^"'\s>]+)"""
)


def build(folder: Path, url: str) -> int:
    """Builds the site in a folder; returns the exit code.

    Args:
        url: the address of the repository; empty: links to its files become text.
    """
    config = load_config(
        str(Path(__file__).with_name("mkdocs.yml")), site_dir=str(folder.absolute())
    )
    config["extra"]["repository"] = url.removesuffix("/").removesuffix(".git")
    try:
        build_site(config)
    except MkDocsException as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    found = [f"{page.relative_to(folder)}: {host}" for page, host in foreign(folder)]
    for line in found:
        print(f"error: the page needs another host: {line}", file=sys.stderr)
    print(f"{folder}/index.html: {len(list(folder.rglob('*.html')))} pages")
    return bool(found)


def foreign(folder: Path) -> list[tuple[Path, str]]:
    """Each page that loads a script, a style or a picture from another host, with the address."""
    return [
        (page, found[1] or found[2])
        for page in sorted(folder.rglob("*.html"))
        for found in _ASSET.finditer(page.read_text("utf-8"))
    ]
