"""`runner submit` with a real sbatch: it finds first what Slurm would reject now or later."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.site.conftest import Site
from tests.site.test_launch_on_slurm import PROGRAM

pytestmark = pytest.mark.site


@pytest.mark.parametrize(
    ("change", "says", "remedy"),
    [
        ('partition="gpu"', "invalid partition specified: gpu", "sinfo -s"),
        ("gpus_per_node=9", "node configuration is not available", "slurm.gpus_per_node"),
        ("nodes=3", "node configuration is not available", "Lower slurm.nodes: it is 3"),
        ('options={"gres": "gpu:a800:1"}', "node configuration is not available", "sinfo"),
        ('options={"no-such-option": "1"}', "unrecognized option", "slurm.options"),
        (
            'time="3-00:00:00"',
            "more than partition batch allows, 2-00:00:00",
            "requeued and resumes",
        ),
        ('time="1h"', "'1h' is not a time limit", "HH:MM:SS"),
    ],
)
def test_a_job_that_could_not_start_is_refused_with_the_way_out(
    site: Site, change: str, says: str, remedy: str
) -> None:
    refused = site.python(
        PROGRAM, "submit", str(site.home / "refused"), "meet", change, check=False
    )
    assert refused.returncode != 0
    assert says in refused.stderr
    assert remedy in refused.stderr
    assert site.run("squeue", "--noheader").stdout == ""


def test_a_second_job_for_the_same_run_folder_is_refused_while_the_first_is_queued(
    site: Site,
) -> None:
    folder = str(site.home / "once")
    first = int(site.python(PROGRAM, "submit", folder, "save_when_asked").stdout)
    refused = site.python(PROGRAM, "submit", folder, "save_when_asked", check=False)
    assert f"job {first} (" in refused.stderr
    assert f"scancel {first}" in refused.stderr
    site.run("scancel", str(first))
    site.wait_for_end(first)


def test_a_run_folder_with_any_name_gets_its_log(site: Site) -> None:
    folder = site.home / 'it\'s 100% "mine" #1 %j'
    job = int(site.python(PROGRAM, "submit", str(folder), "report").stdout)
    assert site.wait_for_end(job)["JobState"] == "COMPLETED"
    assert "rank 0 listens on" in (folder / "logs" / f"slurm-{job}.out").read_text()


def test_a_rank_gets_its_share_of_what_the_nodes_have(site: Site) -> None:
    code = (
        "from runner.job.submit import *; from runner.job.partition import *; "
        "s = ask_partition(None).nodes; "
        "print(cpus_per_task(s, 2, 2)); print(s)"
    )
    said = site.python("-c", code).stdout
    assert said.startswith("(2, ")
    assert said.count("NodeShape(cpus=4, gpus=2, memory=") == 2


# ---- exactly one job: two at once, an answer of sbatch that is lost, a queue that cannot be read

REAL = {name: shutil.which(name) for name in ("sbatch", "squeue")}
TIMED_OUT = "Batch job submission failed: Socket timed out on send/recv operation"
# How an sbatch ends whose job is in the queue all the same (toil#5459).
LOST = {
    "timed out": f"echo 'sbatch: error: {TIMED_OUT}' >&2; exit 1",
    "killed": "kill -9 $$",
    "no number": "exit 0",
}


class Desk:
    """The user's shell on the login node, with Slurm's commands replaced for a while."""

    def __init__(self, site: Site, name: str) -> None:
        self.site, self.folder, self.programs = site, site.home / name, site.home / f"{name}-bin"
        self.programs.mkdir()

    def replace(self, program: str, body: str) -> None:
        """The body sees the real program as `real`. --test-only is always the real one."""
        real = f'real() {{ {REAL[program]} "$@"; }}'
        tests = 'case "$1" in --test-only) real "$@"; exit ;; esac'
        (self.programs / program).write_text(f"#!/bin/sh\n{real}\n{tests}\n{body}\n")
        (self.programs / program).chmod(0o755)

    def submit(self) -> subprocess.CompletedProcess[str]:
        command = (sys.executable, PROGRAM, "submit", str(self.folder), "save_when_asked")
        path = f"PATH={self.programs}:{os.environ['PATH']}"
        return self.site.run("env", path, *command, check=False)

    def jobs(self) -> list[str]:
        """All jobs of this run folder, also those that have ended."""
        shown = self.site.run(
            "squeue", "--noheader", "--states=all", f"--name={self.folder.name}", "--format=%i"
        )
        return shown.stdout.split()

    def end(self) -> None:
        for job in self.jobs():
            self.site.run("scancel", job)
            self.site.wait_for_end(job)


def test_two_who_submit_at_the_same_moment_get_one_job(site: Site) -> None:
    desk = Desk(site, "at-once")
    desk.replace("sbatch", 'sleep 1; real "$@"; sleep 1')
    with ThreadPoolExecutor(2) as pool:
        done = [future.result() for future in [pool.submit(desk.submit) for _ in range(2)]]
    jobs = desk.jobs()
    desk.end()
    assert len(jobs) == 1, [shown.stderr for shown in done]
    assert sorted(shown.returncode for shown in done) == [0, 2], [s.stderr for s in done]


@pytest.mark.parametrize("end", LOST)
def test_an_sbatch_whose_answer_is_lost_makes_one_job_and_its_number_is_found(
    site: Site, end: str
) -> None:
    desk = Desk(site, f"lost-{end.replace(' ', '-')}")
    desk.replace("sbatch", f'real "$@" >/dev/null; {LOST[end]}')
    done = desk.submit()
    jobs = desk.jobs()
    assert done.stdout.split() == jobs and len(jobs) == 1, done.stderr
    assert (desk.folder / "submitted").read_text().split() == jobs
    assert f"job {jobs[0]} (" in desk.submit().stderr
    site.wait(lambda: (desk.folder / "logs" / f"slurm-{jobs[0]}.out").exists())
    desk.end()
    assert desk.jobs() == jobs


def test_a_queue_that_cannot_be_read_is_not_an_empty_one(site: Site) -> None:
    desk = Desk(site, "unread")
    words = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
    desk.replace("squeue", f"echo '{words}' >&2; exit 1")
    done = desk.submit()
    assert (done.returncode, desk.jobs()) == (5, []) and words in done.stderr
    assert not desk.folder.exists(), "a run that `runner status` would call stopped"


def test_a_job_that_nobody_could_be_told_of_is_found_by_the_next_submit(site: Site) -> None:
    desk = Desk(site, "untold")
    asked = site.home / "asked"
    desk.replace("squeue", f'[ -e {asked} ] && exit 1; : >{asked}; real "$@"')
    desk.replace("sbatch", f'real "$@" >/dev/null; {LOST["timed out"]}')
    first = desk.submit()
    (job,) = desk.jobs()
    assert first.returncode == 5 and "Socket timed out" in first.stderr
    assert (desk.folder / "submit.sbatch").exists() and (desk.folder / "logs").is_dir()
    (desk.programs / "squeue").unlink()
    second = desk.submit()
    desk.end()
    assert (second.returncode, second.stdout.split()) == (0, [job]), second.stderr
    assert desk.jobs() == [job]
