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


def test_every_module_and_path_of_the_repository_that_a_page_names_is_there() -> None:
    """CONTRIBUTING named two modules that nobody had written."""
    written = {"envs/profiles/cluster.yml", "envs/profiles/NAME.yml"}  # by `stage env probe`
    pages = {*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")} - {ROOT / "docs/CHANGELOG.md"}
    ours = ("stage", "runner", "scripts", "tests")
    missing = []
    for page in pages:
        text = page.read_text(encoding="utf-8")
        modules = re.findall(r"python3? -m ([a-z_][\w.]*)", text)
        paths = re.findall(r"(?<![\w/.:~$*-])((?:docs|scripts|tests|envs|\.ci)/[\w./-]*\w)", text)
        paths += re.findall(r"`((?:stage|runner)/[\w./-]*\w)`", text)
        for name in modules:
            path = ROOT / name.replace(".", "/")
            if name.split(".")[0] in ours and not (
                path.is_dir() or path.with_suffix(".py").exists()
            ):
                missing.append((page.name, name))
        missing += [(page.name, path) for path in {*paths} - written if not (ROOT / path).exists()]
    assert missing == []


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
