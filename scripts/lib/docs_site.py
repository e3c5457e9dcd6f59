"""Lets mkdocs read the pages as a code host does (`hooks:` in mkdocs.yml).

Each warning ends `scripts/docs`, which is strict. mkdocs itself checks links inside docs/.
"""

from __future__ import annotations

import inspect
import logging
import re
import textwrap
from pathlib import Path
from typing import Any

import click

import runner.cli
import stage.cli

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
LOG = logging.getLogger("mkdocs.hooks.airlift")
_LINK = re.compile(r"(!?)\[((?:[^][]|\[[^]]*\])*)\]\(([^)\s]+)\)")
_LIST_AFTER_TEXT = re.compile(
    r"^((?!\s*(?:[-*]|\d+\.) |\s*$|#|\|).*\n)(?=(?:-|\d+\.) )", re.MULTILINE
)
_led_to: set[Path] = set()


def on_config(config: Any) -> None:
    """Prepares the commands for mkdocs-click, and checks the links of the README at the root."""
    for main in (stage.cli.main, runner.cli.main):
        _load(main)
    _led_to.clear()
    for found in _LINK.finditer((ROOT / "README.md").read_text("utf-8")):
        _target(ROOT / "README.md", found[3])


def _load(command: click.Command) -> None:
    """Imports what is below a command. Paragraphs that click does not wrap become code."""
    paragraphs = inspect.cleandoc(command.help or "").split("\n\n")
    command.help = "\n\n".join(
        textwrap.indent(text[2:], "    ") if text.startswith("\b\n") else text
        for text in paragraphs
    )
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            _load(inner)


def _target(page: Path, link: str) -> Path:
    """The file that a link names. Warns if there is none."""
    target = (page.parent / link.partition("#")[0]).resolve() if link[0] != "#" else page
    if not re.match(r"\w+:", link) and not target.exists():
        LOG.warning(f"{page.relative_to(ROOT)}: `{link}` leads nowhere")
    if target != page:
        _led_to.add(target)
    return target


def on_page_markdown(markdown: str, page: Any, config: Any, **_more: Any) -> str:
    """Fixes what Markdown dialects read differently, and links that lead out of docs/."""

    def link(found: re.Match[str]) -> str:
        picture, text, name = found.groups()
        target = _target(DOCS / page.file.src_uri, name)
        if re.match(r"\w+:|#", name) or (target.is_relative_to(DOCS) and target.is_file()):
            return found[0]
        url = config["extra"]["repository"]
        path = target.relative_to(ROOT).as_posix()
        return f"{picture}[{text}]({url}/blob/HEAD/{path})" if url else text

    return _LIST_AFTER_TEXT.sub(r"\1\n", _LINK.sub(link, markdown))


def on_env(env: Any, config: Any, files: Any) -> None:
    """Warns of pages that no other page leads to."""
    for file in files.documentation_pages():
        if DOCS / file.src_uri not in _led_to and file.src_uri != "README.md":
            LOG.warning(f"docs/{file.src_uri}: no page leads here")
