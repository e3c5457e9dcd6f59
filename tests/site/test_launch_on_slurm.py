"""The launcher on a real Slurm: ranks, the address of rank 0, failures and signals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.site.conftest import Site

pytestmark = pytest.mark.site
PROGRAM = str(Path(__file__).parent / "ranks.py")


def start(site: Site, name: str, program: str, *changes: str) -> tuple[int, Path]:
    folder = site.home / name
    return int(site.python(PROGRAM, "submit", str(folder), program, *changes).stdout), folder


def log(folder: Path, job: int) -> str:
    return (folder / "logs" / f"slurm-{job}.out").read_text()


def rank_reports(folder: Path) -> list[dict[str, object]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("rank-*.json"))]


def wait_for_work(site: Site, folder: Path, ranks: int = 4) -> None:
    site.wait(lambda: len(list(folder.glob("works-*"))) == ranks)


def test_ranks_of_two_nodes_meet(site: Site) -> None:
    job, folder = start(site, "meet", "meet")
    assert site.wait_for_end(job)["JobState"] == "COMPLETED", log(folder, job)
    ranks = rank_reports(folder)
    assert [rank["host"] for rank in ranks] == ["n1", "n1", "n2", "n2"]
    assert [rank["LOCAL_RANK"] for rank in ranks] == ["0", "1", "0", "1"]
    assert {rank["total"] for rank in ranks} == {6.0}
    assert {rank["MASTER_ADDR"] for rank in ranks} == {"10.77.0.1"}
    assert len({rank["MASTER_PORT"] for rank in ranks}) == 1


def test_a_rank_sees_the_gpus_of_its_node(site: Site) -> None:
    """Slurm would bind the tasks of --gpus-per-task, and NCCL would not see the other GPUs."""
    job, folder = start(site, "gpus", "report", 'options={"gpus-per-task": 1}')
    assert site.wait_for_end(job)["JobState"] == "COMPLETED", log(folder, job)
    assert [rank["gpus"] for rank in rank_reports(folder)] == ["0,1"] * 4


def test_a_failing_rank_ends_the_job_with_its_own_exit_code(site: Site) -> None:
    job, folder = start(site, "fail", "fail")
    ended = site.wait_for_end(job, seconds=60)
    assert (ended["JobState"], ended["ExitCode"]) == ("FAILED", "3:0"), log(folder, job)
    assert log(folder, job).count("Traceback of the rank that failed") == 1


def test_a_hang_is_reported_with_the_stacks_of_the_ranks_on_all_nodes_and_ends_the_job(
    site: Site,
) -> None:
    job, folder = start(site, "hang", "hang")
    ended = site.wait_for_end(job, seconds=120)
    said = log(folder, job)
    assert (ended["JobState"], ended["ExitCode"]) == ("FAILED", "5:0"), said
    assert "gave no sign of life" in said
    assert "ranks 0-2 (train):\nrunner:     hang (" in said
    assert "rank 3 (train): does not answer" in said


def test_a_signal_to_the_batch_script_alone_is_handed_on_to_the_ranks(site: Site) -> None:
    job, folder = start(site, "batch-signal", "save_when_asked")
    wait_for_work(site, folder)
    site.run("scancel", "--batch", "--signal=TERM", str(job))
    ended = site.wait_for_end(job)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), log(folder, job)
    assert {path.read_text() for path in folder.glob("saved-*")} == {"SIGUSR1"}


def test_a_job_stopped_while_it_starts_comes_back_until_the_bound_of_requeues_is_reached(
    site: Site,
) -> None:
    job, folder = start(site, "early", "start_slowly")
    for ranks in (4, 8):
        wait_for_work(site, folder, ranks)
        site.run("scancel", "--signal=TERM", str(job))
    ended = site.wait_for_end(job)
    said = log(folder, job)
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("FAILED", "5:0", "1"), said
    assert "back in the queue (restart 1 of at most 1)" in said
    assert said.count("the ranks got a stop signal before they could save") == 2
    assert "stopped: requeued 1 times already; submit the run again to resume" in said


@pytest.mark.parametrize("program", ["save_when_asked", "start_slowly"])
def test_a_cancelled_job_stays_cancelled(site: Site, program: str) -> None:
    job, folder = start(site, f"cancel-{program}", program)
    wait_for_work(site, folder)
    site.run("scancel", str(job))
    assert site.wait_for_end(job)["JobState"] == "CANCELLED"
    # A requeue would come from the batch script; after its process ended, nothing can requeue it.
    site.wait(
        lambda: site.control("nexec", "n1", "pgrep", "-f", str(folder), check=False).returncode == 1
    )
    assert (site.state(job), site.job(job)["Restarts"]) == ("CANCELLED", "0")


def test_a_job_that_another_pushes_aside_saves_and_comes_back(site: Site) -> None:
    job, folder = start(
        site,
        "preempted",
        "save_when_asked",
        'partition="spare"',
        "tasks_per_node=2",
        'options={"exclusive": true}',
    )
    wait_for_work(site, folder)
    other, _ = start(site, "urgent", "report", 'options={"exclusive": true}')
    ended = site.wait_for_end(job)
    assert site.wait_for_end(other)["JobState"] == "COMPLETED"
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), log(folder, job)
    assert len(list(folder.glob("saved-*"))) == 4
    assert len(list(folder.glob("resumed-*"))) == 4


@pytest.mark.slow
def test_a_job_that_reaches_its_time_limit_saves_before_it_and_resumes(site: Site) -> None:
    job, folder = start(site, "limit", "save_when_asked", 'time="00:02:00"')
    ended = site.wait_for_end(job, seconds=200)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), log(folder, job)
    assert {path.read_text() for path in folder.glob("saved-*")} == {"SIGTERM"}


def test_each_run_of_a_sweep_gets_a_run_folder_of_its_own(site: Site) -> None:
    folder = site.home / "sweep"
    job = int(site.python(PROGRAM, "sweep", str(folder), "report", "optimizer.lr=1e-4,3e-4").stdout)
    for member, name in enumerate(("lr=1e-4", "lr=3e-4")):
        ended = site.wait_for_end(f"{job}_{member}")
        assert ended["JobState"] == "COMPLETED", (
            folder / f"logs/slurm-{job}_{member}.out"
        ).read_text()
        assert len(rank_reports(folder / name)) == 2
