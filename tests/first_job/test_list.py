"""Failures of docs/first-job-failures.md are injected by tests, and stay so.

tests/golden/first-jobs.json has them all, with the command that finds each, its exit code, the
words of the cause and the test. What a test demanded once is demanded for ever: a row is added and
changed by hand, and the commit that removes one says why.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
FROZEN = json.loads((ROOT / "tests/golden/first-jobs.json").read_text(encoding="utf-8"))


def test_every_fault_that_was_injected_once_is_injected_still() -> None:
    """Its test is there, and what it demands is in the same file."""
    for row in FROZEN:
        path, _, test = row["test"].partition("::")
        tree = list(ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))))
        assert test in {node.name for node in tree if isinstance(node, ast.FunctionDef)}, row
        texts = [node.value for node in tree if isinstance(node, ast.Constant)]
        demands = "\n".join(text for text in texts if isinstance(text, str))
        assert all(word in demands for word in row["cause"]), row
