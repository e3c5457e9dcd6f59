"""How ranks ended: what is judged where no process is needed; the rest is in `tests/golden`."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from runner.launch.outcome import RanksExit, Traces, outcome_of, outcome_of_command
from runner.run_folder.heartbeat import Failure
from runner.run_folder.logs import last_words

LOST = "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)"


def failure(**given: object) -> Failure:
    whole = {"rank": 0, "host": "n1", "time": 1.0, "consequence": False, "code": 1, "text": "x"}
    return Failure(**{**whole, **given})  # type: ignore[arg-type]


SEEN = ("in_job", "code", "rank", "words", "hung", "signals")


def given(**facts: Any) -> tuple[RanksExit, Traces]:
    """What the launcher saw (`SEEN`), and what the ranks left."""
    seen = {name: value for name, value in facts.items() if name in SEEN}
    left = {name: value for name, value in facts.items() if name not in SEEN}
    return RanksExit(**seen), Traces(**left)


@pytest.mark.parametrize(
    ("ended", "kind", "code"),
    [
        (given(in_job=False, code=-9), "no_memory", 5),
        # rank 0 lost the killed one
        (given(in_job=False, code=-9, failures=(failure(),)), "no_memory", 5),
        (given(in_job=True, code=-9, words="Out Of Memory"), "no_memory", 5),
        (given(in_job=False, code=-6, last_words="throwing 'std::bad_alloc'"), "no_memory", 1),
        (given(in_job=False, code=5, failures=(failure(no_memory=True),)), "no_memory", 5),
        (given(in_job=False, code=1, failures=(failure(),), last_words="MemoryError"), "failed", 1),
        (given(in_job=False, code=1), "failed", 1),
        (given(in_job=False, code=6), "failed", 1),
        (given(in_job=True, code=-6, last_words=LOST), "failed", 5),
        (given(in_job=True, code=-6, last_words=LOST, failures=(failure(code=2),)), "failed", 2),
        (
            given(in_job=True, code=-6, last_words=LOST, failures=(failure(consequence=True),)),
            "failed",
            5,
        ),
        (
            given(
                in_job=False, code=1, failures=(failure(consequence=True),), last_words="bad_alloc"
            ),
            "no_memory",
            1,
        ),
        (given(in_job=False, code=-11), "failed", 1),
        (given(in_job=False, code=-15, signals=frozenset({15})), "stopped", 5),
        (given(in_job=False, code=-15), "failed", 5),
        (given(in_job=False, saved=True, code=1), "stopped", 5),
        (given(in_job=False, hung=True, code=-9), "hung", 5),
    ],
)
def test_a_lack_of_memory_is_known_and_nothing_else_is_taken_for_one(
    ended: tuple[RanksExit, Traces], kind: str, code: int
) -> None:
    judged = outcome_of(*ended)
    assert (judged.kind, judged.exit_code, judged.killed) == (
        kind, code, ended[0].code == -9 and not ended[0].hung,
    )  # fmt: skip


OOM, TRACE = "error: rank 1: 2.5 GiB. Set x.", "Traceback:\n  f\nMemoryError\n"


@pytest.mark.parametrize(
    ("ended", "cause", "report"),
    [
        (
            given(in_job=False, code=5, failures=(failure(text=OOM),)),
            "rank 1: 2.5 GiB",
            ["rank 0 on n1:", OOM],
        ),
        (
            given(in_job=False, code=1, failures=(failure(text=TRACE),) * 3),
            "MemoryError",
            [
                "rank 0 on n1 (2 more failed too or lost it: their logs are beside this one's):",
                *TRACE.splitlines(),
            ],
        ),
        (
            given(in_job=False, code=-9, words="rank 1 was ended; x", failures=(failure(),)),
            "rank 1 was ended",
            ["rank 0 on n1:", "x"],
        ),
        (
            given(in_job=True, code=1, rank=3, words="it; y", last_words="\n".join("abc" * 9)),
            "it",
            [f"[rank 3] {letter}" for letter in ("abc" * 9)[-20:]],
        ),
        (
            given(in_job=True, code=-6, rank=3, words="z", last_words=LOST),
            "",
            [f"[rank 3] {LOST}"],
        ),
    ],
)  # fmt: skip
def test_what_ended_the_first_rank_is_one_sentence_and_what_it_wrote_is_shown(
    ended: tuple[RanksExit, Traces], cause: str, report: list[str]
) -> None:
    judged = outcome_of(*ended)
    assert (judged.cause, [*judged.report]) == (cause, report)


@pytest.mark.parametrize(
    ("number", "cause"),
    [(signal.SIGUSR1, "the job's time was over"), (signal.SIGTERM, "the job was cancelled")],
)
def test_a_command_that_was_cancelled_was_not_out_of_time(number: int, cause: str) -> None:
    ended = RanksExit(in_job=True, signals=frozenset({number}))
    judged = outcome_of_command(ended, last_words(""), "", resumes=False, made=1)
    assert judged.kind == "stopped" and judged.cause.startswith(cause)
    assert "ubmit the run again. If the command goes on from its own checkpoints" in judged.remedy
