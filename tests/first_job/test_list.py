"""Every failure of docs/first-job-failures.md is injected by a test, or it is said why it is not.

tests/golden/first-jobs.json has them all, with the command that finds each, its exit code and the
words of the cause. What a test demanded once is demanded for ever, unless a commit says why not.
"""

from __future__ import annotations

import re
from pathlib import Path

from tests.golden.compare import must_equal
from tests.golden.first_jobs import ENTRY, collect, read, record
from tests.golden.record import path_of

PAGE = Path(__file__).parents[2] / "docs/first-job-failures.md"
FROZEN = read(path_of("first-jobs").read_text(encoding="utf-8"))
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


def entries() -> dict[str, str]:
    """entry -> its text, from the page."""
    parts = re.split(r"^- \*\*([A-Z]\d+)\.\*\*", PAGE.read_text(encoding="utf-8"), flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_every_fault_that_was_injected_once_is_injected_still() -> None:
    before, now = ({(row.entry, row.command) for row in rows} for rows in (FROZEN, collect()))
    lost = [f"{entry} (`{command}`)" for entry, command in sorted(before - now)]
    assert not lost, f"no test injects any more: {', '.join(lost)}"


def test_command_exit_code_and_cause_are_those_that_were_demanded_once(tmp_path: Path) -> None:
    must_equal("first-jobs", record(tmp_path))


def test_every_entry_of_the_page_is_injected_or_said_not_to_be() -> None:
    injected = {row.entry for row in FROZEN if ENTRY.fullmatch(row.entry)}
    assert injected | NOT_INJECTED.keys() == entries().keys()
    assert not injected & NOT_INJECTED.keys()


def test_what_is_found_here_is_not_called_not_found_yet() -> None:
    texts = entries()
    wrong = [
        row.entry
        for row in FROZEN
        if row.how == "found"
        and row.entry in texts
        and texts[row.entry].partition("*Found by:*")[2].strip(" *").startswith("not found")
    ]
    assert not wrong
