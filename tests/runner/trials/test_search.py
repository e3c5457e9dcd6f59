"""`runner bench`: its search, how it judges a trial, and real trials that run out of memory."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.from_stage import UsageError
from runner.trials.bench import (
    SearchResult,
    Trial,
    as_markdown,
    as_text,
    chosen,
    judge_trial,
    result_rows,
    search,
)
from tests.runner.conftest import Cluster


def trial(micro: int, outcome: str = "fits") -> Trial:
    return Trial("zero1", micro, outcome, "", 2, 100.0 * micro, 10.0 * micro, 0.1, 1.0)  # type: ignore[arg-type]


@given(st.integers(0, 5000), st.integers(1, 4096))
def test_what_fits_is_found_to_an_eighth_in_few_trials(capacity: int, most: int) -> None:
    found = search(
        "zero1", most, lambda micro: trial(micro, "fits" if micro <= capacity else "out of memory")
    )
    best = found.best.micro if found.best else 0
    assert best <= min(capacity, most)
    assert best >= min(capacity, most) * 8 / 9 - 1
    assert len(found.trials) <= 2 * most.bit_length() + 4
    assert len({one.micro for one in found.trials}) == len(found.trials)


@pytest.mark.parametrize("text", ["zero1,zero9", " , "])
def test_strategies_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--strategies"):
        chosen(text)


def test_what_fails_is_not_tried_larger() -> None:
    found = search("zero1", 64, lambda micro: trial(micro, "failed"))
    assert [one.micro for one in found.trials] == [1] and found.best is None


@pytest.mark.parametrize(
    ("code", "result", "said", "outcome", "words"),
    [
        (0, {"outcome": "fits", "step_s": 1.0, "tokens_per_s": 3.0}, "", "fits", ""),
        (1, {"outcome": "out of memory", "words": "x"}, "", "out of memory", "out of memory"),
        (None, {}, "", "too slow", "not done after 60 s"),
        (2, {}, "error: no such column\nbye\n", "failed", "error: no such column (see {})"),
        (1, {"outcome": "failed", "words": "no column a"}, "b", "failed", "no column a (see {})"),
        (1, {"outcome": "fits"}, "one\n\nlater\n", "failed", "later (see {})"),
        (7, {}, "", "failed", "exit code 7 (see {})"),
    ],
)
def test_the_end_of_a_trial_is_understood(
    tmp_path: Path, code: int | None, result: dict[str, Any], said: str, outcome: Any, words: str
) -> None:
    log = tmp_path / "trial.log"
    log.write_text(said)
    measures: dict[str, Any] = {
        name: value for name, value in result.items() if isinstance(value, float)
    }
    judged = judge_trial("zero1", 4, code, result, log, 60)
    assert judged == Trial("zero1", 4, outcome, words.format(log), **measures)


def test_the_table_has_a_row_for_each_strategy_also_for_those_that_do_not_run() -> None:
    memory = {"load": {"device": 1.0, "host": 2.0}, "train": {"device": 3.0}}
    found = [
        SearchResult(
            "zero1",
            [replace(trial(1), samples_per_s=21.5), trial(2), trial(4, "out of memory")],
        ),
        SearchResult("zero2", [replace(trial(2), memory=memory, mfu=0.5, note="n"), trial(1)]),
        SearchResult("zero3", [trial(1, "too slow")]),
        SearchResult("ddp", refused="not tried: no | such"),
    ]
    assert (table := result_rows(found, 1000)) == [
        (
            "zero1", "2 x 2", "0.1 s", "200", "20", "50 s", "-", "-",
            "micro 1 is faster: 21.5 samples/s; micro 4: out of memory",
        ),
        (
            "zero2", "2 x 2", "0.1 s", "200 (MFU 50%)", "20", "50 s", "1.07 GB, 3.22 GB",
            "2.15 GB", "n; the largest that --largest allows",
        ),
        ("zero3", "none", *[""] * 6, "micro 1: too slow"),
        ("ddp", *[""] * 7, "not tried: no | such"),
    ]  # fmt: skip
    assert "not tried" in as_text(table) and "no / such" in as_markdown("t", table)


def test_memory_that_ends_ends_a_trial_and_not_the_bench(cluster: Cluster) -> None:
    cluster.write(steps=3)
    sizes = ("--steps", "2", "--largest", "1", "--memory", "0.1")
    done = cluster.run("bench", "tiny.yaml", "--processes", "1", "--strategies", "zero1", *sizes)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    (strategy,) = json.loads((cluster.output("tiny-bench") / "results.json").read_text())[
        "strategies"
    ]
    assert [one["outcome"] for one in strategy["trials"]] == ["out of memory"]
    assert "no strategy ran" in done.stderr and "memory" in done.stdout
