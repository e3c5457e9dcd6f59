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
from tests.first_job.shell import test_left_in_shell, test_written_for_a_shell
from tests.runner import test_disks
from tests.runner.exec import test_exec, test_last_words
from tests.runner.launch import test_surroundings
from tests.runner.ranks import test_node_test
from tests.runner.rehearse import test_nodes, test_rehearsal
from tests.runner.training.engines import test_native_engines
from tests.stage.local import test_files

PAGE = Path(__file__).parents[2] / "docs/first-job-failures.md"
ENTRY = re.compile(r"[A-Z]\d+")
FOUND: frozenset[str] = frozenset().union(
    test_tokenizer.ROWS,
    *(test_assets.IN_A_FOLDER, test_assets.ON_A_HUB, test_assets.GATED, test_assets.GONE),
    *(test_assets.VARIANTS, test_assets.CLOSED),
    *(test_data.FILES, test_data.LABELS, test_data.FEW, test_data.ON_A_HUB, test_data.CARRIED),
    *(test_environment.LOCKED, test_environment.NODES, test_environment.ON_LOGIN),
    *(test_environment.LAUNCHED, test_environment.TOOLS),
    *(test_slurm.REFUSED, test_slurm.LIMITED, test_slurm.NEVER_MET, test_slurm.UNEVEN),
    filter(ENTRY.fullmatch, test_slurm.LATER),
    *(test_storage.DISKS, test_storage.QUOTA, test_storage.NODES, test_storage.RESUMED),
    *(test_slurm.TOO_FEW, test_node_test.FOUND, test_rehearsal.FOUND),
    filter(ENTRY.fullmatch, test_batch_and_memory.ROWS),
    (*test_nodes.LOCKED_MEMORY, test_nodes.LITTLE_SPACE),
    (test_native_engines.UNUSED,),
    *(test_left_in_shell.REFUSED, test_written_for_a_shell.UTF_16),
    filter(ENTRY.fullmatch, test_written_for_a_shell.SCRIPTS),
    filter(ENTRY.fullmatch, (*test_surroundings.SHELLS, *test_surroundings.IMPORTS)),
)
# In a script of one's own, behind `runner exec`: one line of ours after the traceback.
ADVISED = frozenset(
    filter(ENTRY.fullmatch, (*test_last_words.ADVISED, *test_last_words.WAITING, *test_exec.ALONE))
)
AVOIDED: frozenset[str] = frozenset().union(
    test_exec.OFFLINE_LOGGERS,
    test_batch_and_memory.AVOIDED,
    test_tokenizer.AVOIDED,
    test_assets.AVOIDED,
    test_data.AVOIDED,
    test_environment.AVOIDED,
    test_slurm.AVOIDED,
    test_storage.AVOIDED,
    test_left_in_shell.AVOIDED,
    *(test_disks.AVOIDED, test_files.AVOIDED),
)
GPU = "needs a GPU, or a driver"
ELSEWHERE = "injected in tests/runner or tests/site"
LAUNCHERS = "another launcher than ours; `runner train` has no part that could fail so"
NOT_INJECTED = {
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


def test_every_entry_of_the_page_is_injected_or_said_not_to_be() -> None:
    injected = FOUND | AVOIDED | ADVISED
    assert injected | NOT_INJECTED.keys() == entries().keys()
    assert not injected & NOT_INJECTED.keys()


def test_as_many_as_promised_are_injected_and_found_before_a_rank_starts() -> None:
    assert len(FOUND | AVOIDED | ADVISED) >= 130
    assert len(FOUND) >= 92


def test_what_is_found_here_is_not_called_not_found_yet() -> None:
    texts = entries()
    wrong = [
        e
        for e in sorted(FOUND)
        if texts[e].partition("*Found by:*")[2].strip(" *").startswith("not found")
    ]
    assert not wrong
