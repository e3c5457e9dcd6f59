"""The shape of the code: no circle of imports, one name for one thing, files of readable length.

import-linter checks the order of the folders, and does not look into a folder.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("stage", "runner")
LONGEST = 700
"""Lines of a file; what must be one file is exempt."""
ONE_FILE = {"stage/bundle/verifier.py"}
"""Is copied alone into each bundle."""


def modules() -> dict[str, Path]:
    """Dotted name -> file, of each module of both packages."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = path
    return found


def imported(tree: ast.AST, known: Mapping[str, Path]) -> Iterator[str]:
    """The modules that a module imports: at its top, in functions, and for types alone."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports name their module in full"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in known else str(node.module)


def test_no_module_imports_itself_by_way_of_others() -> None:
    known = modules()
    graph = {
        name: {other for other in imported(ast.parse(path.read_text()), known) if other in known}
        - {name}
        for name, path in known.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


def test_no_file_is_longer_than_a_reader_keeps_in_mind() -> None:
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text().splitlines())
        for path in modules().values()
    }
    assert [
        name for name, lines in lengths.items() if lines > LONGEST and name not in ONE_FILE
    ] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_a_file_or_class_has_a_name_of_its_own(package: str) -> None:
    """A command's file in `cli` and the file of its work have one name: they are one thing."""
    files, classes = defaultdict(list), defaultdict(list)
    for path in (ROOT / package).rglob("*.py"):
        where = str(path.relative_to(ROOT / package))
        if path.name not in ("__init__.py", "__main__.py") and path.parts[-2] != "cli":
            files[path.name].append(where)
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                classes[node.name.lstrip("_")].append(where)
    several = [places for places in (*files.values(), *classes.values()) if len(places) > 1]
    assert several == []
