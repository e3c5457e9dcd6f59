"""The slices of the suite, for scripts/test --quick and .ci/run, exist and keep their promises."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from scripts.lib.slices import SLICES

TESTS = Path(__file__).resolve().parent
# Fixtures that test files of several subjects share. Those of one subject, in the conftest of its
# own folder, are left to the whole suite. tests/gpu needs a device, so no slice has it.
CONFTESTS = (TESTS / folder / "conftest.py" for folder in (".", "runner", "site", "stage"))
SHARED = (*CONFTESTS, *(TESTS / "support").glob("*.py"))


def fixtures(path: Path) -> dict[str, ast.FunctionDef]:
    """The fixtures that a file defines."""
    functions = [
        node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)
    ]
    return {
        f.name: f
        for f in functions
        if any("pytest.fixture" in ast.unparse(d) for d in f.decorator_list)
    }


def named(tree: ast.AST) -> set[str]:
    """Every argument of a function, and what `usefixtures` names."""
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and "usefixtures" in ast.unparse(node.func)
    ]
    marked = {
        argument.value
        for call in calls
        for argument in call.args
        if isinstance(argument, ast.Constant)
    }
    return {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)} | {
        str(name) for name in marked
    }


@pytest.mark.parametrize("name", SLICES)
def test_the_files_of_a_slice_are_there(name: str) -> None:
    assert [file for file in SLICES[name] if not (TESTS.parent / file).is_file()] == []
    assert len(set(SLICES[name])) == len(SLICES[name])


def test_the_quick_slice_needs_no_site_and_no_system_package() -> None:
    """scripts/test --quick installs only git and rsync."""
    needed = re.findall(
        r"^    need (\S+)", (TESTS.parent / "scripts/test").read_text(), re.MULTILINE
    )
    assert {"slurmctld", "unshare", "mkfs.btrfs"} <= set(needed)
    texts = {
        file: (TESTS.parent / file).read_text()
        for file in set(SLICES["quick"]) - {"tests/test_slices.py"}
    }
    assert [f for f, text in texts.items() if any(f'"{tool}"' in text for tool in needed)] == []
    assert [
        f for f, text in texts.items() if "mark.site" in text or f.startswith("tests/site")
    ] == []


def test_the_slice_of_fixtures_uses_each_that_files_share() -> None:
    """A fixture is used if a test in or below its folder asks for it, or a used fixture does."""
    asked = {
        file: named(ast.parse((TESTS.parent / file).read_text())) for file in SLICES["fixtures"]
    }
    missing = []
    for path in SHARED:
        folder = TESTS if path.parent.name == "support" else path.parent
        near = [
            words for file, words in asked.items() if (TESTS.parent / file).is_relative_to(folder)
        ]
        found = fixtures(path)
        used = {
            name
            for name, f in found.items()
            if "autouse" in ast.unparse(f.decorator_list[0]) and near
        }
        used |= {name for name in found if any(name in words for words in near)}
        for other in SHARED:  # each of which is used, or is itself missing
            used |= {
                name for f in fixtures(other).values() for name in found if name in named(f.args)
            }
        missing += [f"{path.relative_to(TESTS)}: {name}" for name in found if name not in used]
    assert missing == []
