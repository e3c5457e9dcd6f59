"""The pages in docs/: their links, the files and commands that they name, and the site."""

from __future__ import annotations

import logging
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


def test_anchors_are_those_of_a_code_host() -> None:
    assert docs_site.slugify("`stage fetch MANIFEST -o B`") == "stage-fetch-manifest--o-b"
    assert docs_site.slugify("Code of a model: `allow_code`") == "code-of-a-model-allow_code"


def test_a_link_that_leads_nowhere_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for name in ("SECURITY.md#x", "../README.md", "https://example.org", "#here"):
            docs_site._target(DOCS / "README.md", name)
        assert not caplog.messages
        docs_site._target(DOCS / "README.md", "../runs/nowhere.yaml")
    assert caplog.messages == ["docs/README.md: `../runs/nowhere.yaml` leads nowhere"]


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


def test_the_tree_and_the_rules_of_the_architecture_name_each_folder() -> None:
    text = (DOCS / "explanation/architecture.md").read_text("utf-8")
    rows = re.findall(r"^ {6}(.{46})(.*)$", text, re.MULTILINE)
    tree = [{row[side].split()[0] for row in rows if row[side].strip()} for side in (0, 1)]
    for package, named in zip(("stage", "runner"), tree, strict=True):
        entries = (ROOT / package).iterdir()
        # Files beside the folders are the ground, which is one row.
        found = {path.name for path in entries if path.is_dir() and not path.name.startswith("__")}
        assert named - {"files,", "errors,"} == found
    contracts = (ROOT / "pyproject.toml").read_text("utf-8").split("[[tool.importlinter")
    rules = text[text.index("## Five import rules") :]
    for package, contract in (("stage", contracts[1]), ("runner", contracts[2])):
        layers = contract[contract.index("layers = [") : contract.index("\n]")]
        wanted = set(re.findall(rf"\b{package}\.(\w+)", layers))
        (listed,) = re.findall(rf"^\d\. `{package}`: ((?:.|\n  )*)", rules, re.MULTILINE)
        assert set(re.findall(r"\w+", listed)) == wanted


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


def test_sentences_of_the_tutorial_are_short() -> None:
    """25 words at most, as in the README."""
    text = (DOCS / "tutorial/first-cluster.md").read_text("utf-8")
    prose = "\n".join(line for line in text.splitlines() if not line.startswith("    "))
    sentences = re.split(r"[.:;?!](?:\s|$)|\n\n|\|", re.sub(r"`[^`]*`", "code", prose))
    assert [s for s in sentences if len(s.split()) > 25] == []


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
