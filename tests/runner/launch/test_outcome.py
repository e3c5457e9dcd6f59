"""How ranks ended: what is judged where no process is needed; the rest is in `tests/golden`."""

from __future__ import annotations

import pytest

from runner.launch.outcome import Ended, outcome_of
from runner.run_folder.heartbeat import Failure

LOST = "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)"


def failure(**given: object) -> Failure:
    whole = {"rank": 0, "host": "n1", "time": 1.0, "consequence": False, "code": 1, "text": "x"}
    return Failure(**{**whole, **given})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ended", "kind", "code"),
    [
        (Ended(in_job=False, code=-9), "no_memory", 5),
        # rank 0 lost the killed one
        (Ended(in_job=False, code=-9, failure=failure()), "no_memory", 5),
        (Ended(in_job=True, code=-9, words="Out Of Memory"), "no_memory", 5),
        (Ended(in_job=False, code=-6, last_words="throwing 'std::bad_alloc'"), "no_memory", 1),
        (Ended(in_job=False, code=5, failure=failure(no_memory=True)), "no_memory", 5),
        (Ended(in_job=False, code=1, failure=failure(), last_words="MemoryError"), "failed", 1),
        (Ended(in_job=False, code=1), "failed", 1),
        (Ended(in_job=False, code=6), "failed", 1),
        (Ended(in_job=True, code=-6, last_words=LOST), "failed", 5),
        (Ended(in_job=True, code=-6, last_words=LOST, failure=failure(code=2)), "failed", 2),
        (
            Ended(in_job=True, code=-6, last_words=LOST, failure=failure(consequence=True)),
            "failed",
            5,
        ),
        (
            Ended(in_job=False, code=1, failure=failure(consequence=True), last_words="bad_alloc"),
            "no_memory",
            1,
        ),
        (Ended(in_job=False, code=-11), "failed", 1),
        (Ended(in_job=False, code=-15, signals=frozenset({15})), "stopped", 5),
        (Ended(in_job=False, code=-15), "failed", 5),
        (Ended(in_job=False, saved=True, code=1), "stopped", 5),
        (Ended(in_job=False, hung=True, code=-9), "hung", 5),
    ],
)
def test_a_lack_of_memory_is_known_and_nothing_else_is_taken_for_one(
    ended: Ended, kind: str, code: int
) -> None:
    outcome = outcome_of(ended)
    assert (outcome.kind, outcome.exit_code, outcome.killed) == (
        kind, code, ended.code == -9 and not ended.hung,
    )  # fmt: skip


OOM, TRACE = "error: rank 1: 2.5 GiB. Set x.", "Traceback:\n  f\nMemoryError\n"


@pytest.mark.parametrize(
    ("ended", "cause", "report"),
    [
        (
            Ended(in_job=False, code=5, failure=failure(text=OOM), num_failures=1),
            "rank 1: 2.5 GiB",
            ["rank 0 on n1:", OOM],
        ),
        (
            Ended(in_job=False, code=1, failure=failure(text=TRACE), num_failures=3),
            "MemoryError",
            [
                "rank 0 on n1 (2 more failed too or lost it: their logs are beside this one's):",
                *TRACE.splitlines(),
            ],
        ),
        (
            Ended(in_job=False, code=-9, words="rank 1 was ended; x", failure=failure(),
                  num_failures=1),
            "rank 1 was ended",
            ["rank 0 on n1:", "x"],
        ),
        (
            Ended(in_job=True, code=1, rank=3, words="it; y", last_words="\n".join("abc" * 9)),
            "it",
            [f"[rank 3] {letter}" for letter in ("abc" * 9)[-20:]],
        ),
        (
            Ended(in_job=True, code=-6, rank=3, words="z", last_words=LOST),
            "",
            [f"[rank 3] {LOST}"],
        ),
    ],
)  # fmt: skip
def test_what_ended_the_first_rank_is_one_sentence_and_what_it_wrote_is_shown(
    ended: Ended, cause: str, report: list[str]
) -> None:
    outcome = outcome_of(ended)
    assert (outcome.cause, [*outcome.report]) == (cause, report)
