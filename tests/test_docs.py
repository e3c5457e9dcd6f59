"""The pages in docs/: their links, what is generated in them, and the site."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts.lib.docs import generate, links

DOCS = links.ROOT / "docs"


def test_every_link_and_anchor_of_the_pages_leads_somewhere() -> None:
    assert list(links.broken()) == []


def test_anchors_are_those_of_a_code_host() -> None:
    assert links.slug("`stage fetch MANIFEST -o BUNDLE`") == "stage-fetch-manifest--o-bundle"
    assert links.slug("Code of a model: `allow_code`") == "code-of-a-model-allow_code"


def test_what_is_generated_is_as_the_code_gives_it() -> None:
    """`scripts/docs --write` writes it again."""
    assert [page.relative_to(links.ROOT) for page, _ in generate.stale()] == []
    assert generate.used() == set(generate.BLOCKS)


def test_the_tree_and_the_rules_of_the_architecture_name_each_folder() -> None:
    text = (DOCS / "explanation/architecture.md").read_text("utf-8")
    rows = re.findall(r"^ {6}(.{46})(.*)$", text, re.MULTILINE)
    tree = [{row[side].split()[0] for row in rows if row[side].strip()} for side in (0, 1)]
    for package, named in zip(("stage", "runner"), tree, strict=True):
        entries = (links.ROOT / package).iterdir()
        # Files beside the folders are the ground, which is one row.
        found = {path.name for path in entries if path.is_dir() and not path.name.startswith("__")}
        assert named - {"files,", "errors,"} == found
    contracts = (links.ROOT / "pyproject.toml").read_text("utf-8").split("[[tool.importlinter")
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
    sources = [path for name in ("stage", "runner") for path in (links.ROOT / name).rglob("*.py")]
    files = [links.ROOT / "pyproject.toml", *links.pages(), *sources]
    gone = [
        f"{file.relative_to(links.ROOT)}: {found}"
        for file in files
        for line in file.read_text("utf-8").splitlines()
        if " became " not in line and "docs/spec.md" not in line  # of git-lfs
        for found in named.findall(line)
        if not (links.ROOT / found).exists() and not (file.parent / found).exists()
    ]
    assert gone == []


def test_folders_hold_at_most_twelve_pages() -> None:
    folders = [path for path in DOCS.rglob("*") if path.is_dir() and path.name != "adr"]
    counts = {path: sum(file.is_file() for file in path.iterdir()) for path in folders}
    assert {str(path): count for path, count in counts.items() if count > 12} == {}


def test_sentences_of_the_tutorial_are_short() -> None:
    """25 words at most, as in the README."""
    text = (DOCS / "tutorial/first-cluster.md").read_text("utf-8")
    prose = "\n".join(line for line in text.splitlines() if not line.startswith("    "))
    sentences = re.split(r"[.:;?!](?:\s|$)|\n\n|\|", re.sub(r"`[^`]*`", "code", prose))
    assert [s for s in sentences if len(s.split()) > 25] == []


def test_the_tutorial_and_the_how_to_pages_name_commands_that_exist() -> None:
    known = {
        heading
        for name in ("stage", "runner")
        for heading in re.findall(
            r"^## (.*)$", (DOCS / f"reference/commands-{name}.md").read_text("utf-8"), re.MULTILINE
        )
    }
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


def test_the_site_builds_strictly_and_needs_no_other_host(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="mkdocs-material is not installed")
    from scripts.lib.docs import site

    assert site.build(tmp_path / "site", "") == 0
    home = (tmp_path / "site/index.html").read_text("utf-8")
    assert "tutorial/first-cluster.html" in home and "fonts.googleapis" not in home
    (tmp_path / "site/index.html").write_text('<script src="https://cdn.example/x.js"></script>')
    assert site.foreign(tmp_path / "site") == [
        (tmp_path / "site/index.html", "https://cdn.example/x.js")
    ]
