"""The whole product on a cluster: a user submits a run, it is interrupted, and loses nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.site.conftest import Site, log, submit

pytestmark = pytest.mark.site


def losses(run_folder: Path) -> list[tuple[int, float]]:
    path = run_folder / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [(line["step"], line["loss"]) for line in lines if "loss" in line]


def test_a_job_trains_on_two_nodes_and_exports_its_model(undisturbed: Path) -> None:
    recorded = losses(undisturbed)
    assert [step for step, _ in recorded] == list(range(1, 41))
    assert recorded[-1][1] < recorded[0][1] - 1
    assert list((undisturbed / "model").glob("*.safetensors"))
    assert (
        json.loads((undisturbed / "environment.json").read_text())["slurm"]["SLURM_NTASKS"] == "2"
    )


def test_a_stopped_job_is_requeued_and_one_with_a_killed_rank_resumes_when_submitted_again(
    site: Site, undisturbed: Path
) -> None:
    job, run_folder = submit(site, "disturbed")
    site.wait(lambda: len(losses(run_folder)) >= 2, why=lambda: log(run_folder))
    site.run("scancel", "--signal=TERM", str(job))
    site.wait(lambda: "resumed from step-" in log(run_folder), why=lambda: log(run_folder))
    assert not (run_folder / "stopped").exists()
    stopped = int(log(run_folder).partition("resumed from step-")[2].split()[0])
    site.wait(lambda: len(losses(run_folder)) > stopped, why=lambda: log(run_folder))
    site.control("nexec", "n2", "pkill", "-KILL", "--newest", "--full", "runner rank")
    ended = site.wait_for_end(job)
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("FAILED", "5:0", "1"), log(
        run_folder
    )
    again, _ = submit(site, "disturbed")
    assert site.wait_for_end(again)["JobState"] == "COMPLETED", log(run_folder)
    assert log(run_folder).count("resumed from step-") == 2
    assert losses(run_folder) == losses(undisturbed)
