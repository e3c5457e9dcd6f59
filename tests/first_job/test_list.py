"""Every failure of docs/first-job-failures.md is injected here, or it is said why it is not."""

from __future__ import annotations

import re
from pathlib import Path

from tests.first_job import (
    test_assets,
    test_batch_and_memory,
    test_data,
    test_environment,
    test_slurm,
    test_storage,
    test_tokenizer,
)

PAGE = Path(__file__).parents[2] / "docs/first-job-failures.md"
FOUND: frozenset[str] = frozenset().union(
    test_tokenizer.ROWS,
    *(test_assets.IN_A_FOLDER, test_assets.ON_A_HUB, test_assets.GATED, test_assets.GONE),
    *(test_assets.VARIANTS, test_assets.CLOSED),
    *(test_data.FILES, test_data.LABELS, test_data.FEW, test_data.ON_A_HUB, test_data.CARRIED),
    *(test_environment.LOCKED, test_environment.NODES, test_environment.ON_LOGIN),
    *(test_environment.LAUNCHED, test_environment.TOOLS),
    *(test_slurm.REFUSED, test_slurm.LIMITED, test_slurm.NEVER_MET, test_slurm.UNEVEN),
    *(test_storage.DISKS, test_storage.QUOTA, test_storage.NODES, test_storage.RESUMED),
    test_batch_and_memory.ROWS,
)
AVOIDED: frozenset[str] = frozenset().union(
    test_batch_and_memory.AVOIDED,
    test_tokenizer.AVOIDED,
    test_assets.AVOIDED,
    test_data.AVOIDED,
    test_environment.AVOIDED,
    test_slurm.AVOIDED,
    test_storage.AVOIDED,
)
GPU = "needs a GPU, or a driver"
ELSEWHERE = "injected in tests/runner or tests/site"
REHEARSED = "injected in tests/runner/rehearse"
LAUNCHERS = "another launcher than ours; `runner train` has no part that could fail so"
NOT_INJECTED = {
    **dict.fromkeys(("C7", "C8", "L7", "L8", "N10", "B7"), GPU),
    **dict.fromkeys(("E1", "E2", "E3", "E4", "E9", "E10", "E11", "J10", "J16", "J17"), ELSEWHERE),
    **dict.fromkeys(("X1", "X2", "X3", "X7", "X8", "X10", "L1", "L2", "L3", "L4", "L9"), LAUNCHERS),
    **dict.fromkeys(("L10", "N1", "N3", "N4", "N5", "N6", "N7", "N8", "K2"), ELSEWHERE),
    **dict.fromkeys(("K8", "K9", "O1", "O2", "O5", "O6", "O7", "O8", "O9", "O10"), ELSEWHERE),
    **dict.fromkeys(("S6", "S7", "S8", "S9", "S10"), ELSEWHERE),
    **dict.fromkeys(("T14", "K10"), REHEARSED),
    **dict.fromkeys(("O11", "O12"), "a library's own download, behind `runner exec`"),
}


def entries() -> dict[str, str]:
    """entry -> its text, from the page."""
    parts = re.split(r"^- \*\*([A-Z]\d+)\.\*\*", PAGE.read_text(encoding="utf-8"), flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_every_entry_of_the_page_is_injected_or_said_not_to_be() -> None:
    known = FOUND | AVOIDED | NOT_INJECTED.keys()
    assert known == entries().keys()
    assert not (FOUND | AVOIDED) & NOT_INJECTED.keys()


def test_as_many_as_promised_are_injected_and_found_before_a_rank_starts() -> None:
    assert len(FOUND | AVOIDED) >= 90
    assert len(FOUND) >= 80


def test_what_is_found_here_is_not_called_not_found_yet() -> None:
    texts = entries()
    wrong = [
        e
        for e in sorted(FOUND)
        if texts[e].partition("*Found by:*")[2].strip(" *").startswith("not found")
    ]
    assert not wrong
