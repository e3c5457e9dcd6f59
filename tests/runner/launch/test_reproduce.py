"""`runner train --reproduce`: the same losses bit for bit, and no other number passes for them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from runner.launch.reproduce import compare
from runner.run_folder.history import History
from tests.runner.conftest import Cluster


@pytest.mark.slow  # two runs; the comparison itself is in the tests below
def test_a_run_comes_out_again_bit_for_bit_and_a_forged_loss_does_not(
    cluster: Cluster, trained_at: Callable[[int], Path]
) -> None:
    folder = cluster.take(trained_at(2))
    done = cluster.run("train", "--reproduce", str(folder))
    assert done.returncode == 0, done.stderr
    assert "reproduced: 9 losses, all equal, bit for bit" in done.stdout
    metrics = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    lines[3]["loss"] = lines[3]["loss"] + 2e-16 * 8
    metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    verdict = compare(
        History.read(folder), History.read(folder.with_name(f"{folder.name}-reproduced"))
    )
    assert not verdict.ok
    assert verdict.first is not None and verdict.first[:2] == (lines[3]["step"], "loss")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "give a run file, or --reproduce"),
        (["tiny.yaml", "--reproduce", "output/tiny"], "give a run file, or --reproduce"),
        (["--reproduce", "nowhere"], "no such run folder"),
        (["--reproduce", "output/empty"], "nothing to compare"),
        (["--reproduce", "output/empty", "--set", "seed=1"], "cannot be combined with --set"),
    ],
)
def test_what_cannot_be_reproduced_is_refused(
    cluster: Cluster, arguments: list[str], says: str
) -> None:
    (cluster.output("empty") / "logs").mkdir(parents=True)
    cluster.write()
    assert says in cluster.refused("train", *arguments)


def test_another_number_of_ranks_or_bundle_and_the_run_itself_are_refused(
    cluster: Cluster, trained_at: Callable[[int], Path]
) -> None:
    folder = cluster.take(trained_at(2))
    again = ("train", "--reproduce", str(folder))
    assert "the run had 2 ranks, here are 3" in cluster.refused(*again, "--processes", "3")
    assert "the recorded run itself" in cluster.refused(*again, "--output", str(folder))
    facts = json.loads((folder / "environment.json").read_text())
    (folder / "environment.json").write_text(json.dumps(facts | {"bundle_id": "0" * 64}))
    assert "the run was trained on 000000000000" in cluster.refused(*again)
