"""A sweep on one machine: checked as a whole, one run after another, continued, compared."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest

from runner.run_folder.status import all_runs
from tests.runner.conftest import Cluster, metrics

QUICK = {
    "steps": 2,
    "engine": {"name": "ddp"},
    "dataset": {"asset": "reference", "limit": {"train": 40, "validation": 8}},
}


def test_no_run_begins_before_all_are_found_to_work(cluster: Cluster) -> None:
    cluster.write(**QUICK)
    sweep = ("train", "tiny.yaml", "--processes", "2", "--array")
    both = cluster.refused(*sweep, "batch.global=8,7,5")
    assert "global=7: " in both and "global=5: " in both
    assert "`precision` must be" in cluster.refused(*sweep, "precision=fp32,fp8")
    assert "--array seed=1,1: a value is given twice" in cluster.refused(*sweep, "seed=1,1")
    assert not list(cluster.output().glob("*/metrics.jsonl"))
    done = cluster.run(*sweep, "seed=1,2", "--dry-run")
    assert done.returncode == 0 and "dry run: 2 runs checked" in done.stdout
    assert not list(cluster.output().glob("*/metrics.jsonl"))


def test_finished_runs_are_left_as_they_are_and_compared(
    cluster: Cluster, trained_at: object
) -> None:
    """The members are copies of a run that has ended; nothing trains."""
    done = Path(trained_at(2))  # type: ignore[operator]
    cluster.write(engine={"zero": 2})
    cluster.take_data(done)
    for seed in (42, 43):
        member = cluster.output() / f"seed={seed}"
        shutil.copytree(done, member)
        (member / "config.yaml").write_text(
            (done / "config.yaml").read_text().replace("seed: 42", f"seed: {seed}")
        )
    shutil.rmtree(cluster.output() / "seed=42" / "checkpoints")
    shutil.rmtree(cluster.output() / "seed=43" / "checkpoints")
    sweep = cluster.run("train", "tiny.yaml", "--processes", "2", "--array", "seed=42,43")
    assert sweep.returncode == 0, sweep.stdout + sweep.stderr
    assert sweep.stdout.count("finished already") == 2
    assert " · seed=43" in sweep.stdout
    assert "the lowest validation loss: seed=42" in sweep.stdout
    assert " · seed=42" in (cluster.output() / "report.html").read_text()
    listed = {found.run_folder.name for found in all_runs(cluster.folder / "output")}
    assert listed == {"seed=42", "seed=43"}


@pytest.mark.slow  # two real runs, one of them stopped and continued
def test_a_sweep_is_stopped_continued_and_compared(cluster: Cluster) -> None:
    cluster.write(**{**QUICK, "steps": 6})
    arguments = ("train", "tiny.yaml", "--processes", "1", "--array", "optimizer.lr=1e-3,1e-4")
    process = cluster.start(*arguments)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step 1/"):
            break
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=200)
    assert process.returncode == 5, out + err
    assert "run the same command again to continue" in out
    assert not (cluster.output() / "lr=1e-4").exists()
    done = cluster.run(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    for rate in ("1e-3", "1e-4"):
        assert [step for step, _ in metrics(cluster.output() / f"lr={rate}")] == list(range(1, 7))
    assert "the lowest validation loss: lr=" in done.stdout
