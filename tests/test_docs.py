"""The pages in docs/: their links, the files and commands that they name, and the site."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

import runner.cli
import stage.cli
from scripts.lib import docs_site

ROOT = docs_site.ROOT
DOCS = docs_site.DOCS
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


def commands() -> set[str]:
    """All commands, as they are typed: `stage env lock`."""

    def below(group: click.Group, name: str) -> set[str]:
        context = click.Context(group)
        found: set[str] = set()
        for inner in group.list_commands(context):
            command = group.get_command(context, inner)
            if isinstance(command, click.Group):
                found |= below(command, f"{name} {inner}")
            elif command and not command.hidden:
                found.add(f"{name} {inner}")
        return found

    return below(stage.cli.main, "stage") | below(runner.cli.main, "runner")


def test_the_site_builds_strictly_and_needs_no_other_host(tmp_path: Path) -> None:
    """Strict: a dead link or anchor, and a page that no other page leads to, end the build."""
    pytest.importorskip("mkdocs_click", reason="the extra `dev` is not installed")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    asset = re.compile(
        r"""<(?:script|img|iframe|source|video|audio)\b[^>]*\bsrc=["']?(?:https?:)?//|"""
        r"""<link\b(?![^>]*rel=["']?(?:canonical|next|prev))[^>]*\bhref=["']?(?:https?:)?//"""
    )
    pages = {page: page.read_text("utf-8") for page in tmp_path.rglob("*.html")}
    assert [str(page) for page, text in pages.items() if asset.search(text)] == []
    page = pages[tmp_path / "reference/commands.html"]
    assert "<code>Example:\n  stage apply bundle patch" in page  # an example is code
    listed = re.findall(r'<h[2-4] id="([\w-]+)"', page)
    assert {name.replace(" ", "-") for name in commands()} <= set(listed)


def test_files_that_pages_and_sources_name_are_there() -> None:
    named = re.compile(
        r"(?<![\w/.*-])(docs/[\w/-]+\.md|(?:stage|runner|scripts|tests)/[\w/-]+\.py)\b"
    )
    sources = [path for name in ("stage", "runner") for path in (ROOT / name).rglob("*.py")]
    files = [ROOT / "pyproject.toml", *PAGES, *sources]
    gone = [
        f"{file.relative_to(ROOT)}: {found}"
        for file in files
        for line in file.read_text("utf-8").splitlines()
        if " became " not in line and "docs/spec.md" not in line  # of git-lfs
        for found in named.findall(line)
        if not (ROOT / found).exists() and not (file.parent / found).exists()
    ]
    assert gone == []


def test_the_tutorial_and_the_how_to_pages_name_commands_that_exist() -> None:
    known = commands()
    groups = {"stage env"}
    for page in [*DOCS.glob("tutorial/*.md"), *DOCS.glob("howto/*.md"), DOCS / "README.md"]:
        for line in page.read_text("utf-8").splitlines():
            if not line.startswith("    "):
                continue
            command = re.match(
                r" +(?:\w*\$ )?(?:srun (?:-\S+ )*)?((?:stage|runner) [a-z]+)( [a-z]+)?", line
            )
            if command:
                name = command[1] if command[1] not in groups else f"{command[1]}{command[2]}"
                assert name in known, f"{page.name}: {line}"
