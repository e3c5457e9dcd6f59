"""Every failure of docs/first-job-failures.md is injected by a test, or it is said why it is not.

tests/golden/first-jobs.json has them all, with the command that finds each, its exit code, the
words of the cause and the test. What a test demanded once is demanded for ever: a row is added and
changed by hand, and the commit that removes one says why.
"""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/first-job-failures.md"
FROZEN = json.loads((ROOT / "tests/golden/first-jobs.json").read_text(encoding="utf-8"))
ENTRY = re.compile(r"[A-Z]\d+")
GPU = "needs a GPU, or a driver"
ELSEWHERE = "injected in tests/runner or tests/site"
LAUNCHERS = "another launcher than ours; `runner train` has no part that could fail so"
OWN_WORDS = "the library's own words say what helps"
NOT_INJECTED = {
    **dict.fromkeys(("A10", "L12"), OWN_WORDS),
    **dict.fromkeys(("C7", "C8", "L8", "B7"), GPU),
    **dict.fromkeys(("X10", "L2", "L3", "L4"), LAUNCHERS),
    **dict.fromkeys(("E2", "E9", "L10", "N1", "N6", "K2"), ELSEWHERE),
    **dict.fromkeys(("K8", "K9", "O1", "O2", "O5", "O6", "O7", "O10"), ELSEWHERE),
    "K10": "the transformers of these tests only warns",
    **dict.fromkeys(("O12",), "a library's own download, behind `runner exec`"),
}


def test_every_fault_that_was_injected_once_is_injected_still() -> None:
    """Its test is there, and what it demands is in the same file."""
    for row in FROZEN:
        path, _, test = row["test"].partition("::")
        tree = list(ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))))
        assert test in {node.name for node in tree if isinstance(node, ast.FunctionDef)}, row
        texts = [node.value for node in tree if isinstance(node, ast.Constant)]
        demands = "\n".join(text for text in texts if isinstance(text, str))
        assert all(word in demands for word in row["cause"]), row


def test_every_entry_of_the_page_is_injected_or_said_not_to_be() -> None:
    entries = re.findall(r"^- \*\*([A-Z]\d+)\.\*\*", PAGE.read_text(encoding="utf-8"), flags=re.M)
    injected = {row["entry"] for row in FROZEN if ENTRY.fullmatch(row["entry"])}
    assert injected | NOT_INJECTED.keys() == set(entries)
    assert not injected & NOT_INJECTED.keys()
