"""Which remedies the tests obey that tell a story, or that stand beside the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TypeVar

Story = TypeVar("Story", bound=Callable[..., None])


def obeys(file: str, *remedies: str) -> Callable[[Story], Story]:
    """Notes which remedies a test obeys: how they begin, or what is in them. `stories` reads it."""
    del file, remedies
    return lambda story: story


@cache
def stories() -> list[tuple[str, str]]:
    """(file, a part of its remedy) of each `@obeys` and `Row`; literals and constants alone."""
    found = []
    for path in sorted(Path(__file__).parents[1].rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        if "@obeys(" not in text and "Row(" not in text:
            continue
        tree = ast.parse(text)
        names: dict[str, str] = {}
        for node in tree.body:
            if isinstance(node, ast.Assign) and (name := getattr(node.targets[0], "id", "")):
                names[name] = getattr(node.value, "value", "")
        for call in ast.walk(tree):
            called = getattr(call.func, "id", "") if isinstance(call, ast.Call) else ""
            if isinstance(call, ast.Call) and called in ("obeys", "Row"):
                file, *remedies = (
                    names[word.id] if isinstance(word, ast.Name) else ast.literal_eval(word)
                    for word in call.args[: 2 if called == "Row" else None]
                )
                found += [(file, remedy) for remedy in remedies]
    return found


def in_it(remedy: str, pattern: str) -> str:
    """The part of a remedy that the pattern describes."""
    found = re.search(pattern, remedy)
    assert found is not None, remedy
    return found[0]
