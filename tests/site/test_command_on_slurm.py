"""A command is a run: a user's own scripts in jobs of a real Slurm, none of them edited."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.site.conftest import RUNNER, Site
from tests.support.commands import run_file, write_project

pytestmark = pytest.mark.site

ALONE = {"nodes": 1, "tasks_per_node": 1, "options": {"cpus-per-task": 1, "mem": "500M"}}
OWN_SRUN = "bash -c 'cd .; srun --ntasks=2 --ntasks-per-node=1 python train.py --sleep_at 1; date'"
ONLY_LOGS = "bash -c 'mkdir -p out; touch out/waits-0.log; sleep 600'"
RUN_SH = """\
#!/bin/bash
# As people write it: the nodes are found by hand, and srun starts the rest.
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export HEAD_NODE=$head
srun --ntasks=2 --ntasks-per-node=1 python ask.py
echo "it ended with $?"
"""
ASK_PY = """\
import os, socket
from pathlib import Path
from huggingface_hub import hf_hub_download
assert Path(hf_hub_download("acme/tiny-bert", "config.json")).stat().st_size
rank = os.environ["SLURM_PROCID"]
try:
    hf_hub_download("acme/not-there", "config.json")
except Exception as error:
    Path(f"asked-{rank}").write_text(f"{socket.gethostname()} {os.environ['HEAD_NODE']}")
"""
IMAGE_SH = """\
#!/bin/sh
# As an image: variables of its own, and no program of Slurm.
export PATH=$(dirname "$0")/bin RANK=9 WORLD_SIZE=10
exec "$@"
"""


@dataclass
class Project:
    """A user's project in their home on the cluster, and what they type there."""

    site: Site
    folder: Path

    def runner(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        there = ("sh", "-c", 'cd "$0" && exec "$@"', str(self.folder))
        return self.site.run(*there, *RUNNER, *words, check=check)

    def submit(self, name: str, command: str | list[str], *words: str, **keys: Any) -> int:
        """Writes a run file and submits it."""
        file = run_file(self.folder, name, command, **keys)
        said = self.runner("submit", file.name, "--bundle", "../bundle", *words).stdout
        return self.site.job_number(said)

    def output(self, name: str) -> Path:
        return self.folder / "output" / name

    def work(self, name: str) -> Path:
        return self.output(name) / "work"

    def log(self, name: str) -> str:
        logs = sorted((self.output(name) / "logs").glob("slurm-*.out"))
        return "\n".join(path.read_text(errors="replace") for path in logs)

    def ended(self, name: str, job: int, state: str = "COMPLETED", code: str = "0:0") -> str:
        """Waits for the end of a job, which must be this; returns its log."""
        found = self.site.wait_for_end(job)
        log = self.log(name)
        assert (found["JobState"], found["ExitCode"]) == (state, code), log
        return log

    def ranks(self, name: str, folder: str = "out") -> list[dict[str, Any]]:
        """What the ranks of train.py found."""
        files = sorted((self.work(name) / folder).glob("rank-*.json"))
        return [json.loads(file.read_text()) for file in files]

    def status(self, name: str) -> str:
        return self.runner("status", f"output/{name}").stdout


@pytest.fixture(scope="module")
def project(site: Site, bundle: Path) -> Project:
    folder = write_project(site.home / "project", run_sh=RUN_SH, ask_py=ASK_PY)
    owner = site.home.stat()
    for path in (folder, *folder.rglob("*")):
        os.chown(path, owner.st_uid, owner.st_gid)
    return Project(site, folder)


def test_a_script_that_reads_slurms_variables_is_the_one_that_was_submitted(
    project: Project,
) -> None:
    """Four ranks on two nodes, of an array: the project and the run file are edited meanwhile."""
    shape = {"nodes": 2, "tasks_per_node": 2, "options": {"hold": True, "mem": "500M"}}
    job = project.submit(
        "ranks",
        "python train.py --lr ${lr} --output_dir out",
        *("--array", "lr=1e-4,3e-4"),
        slurm=shape,
        values={"lr": 1.0},
    )
    (project.folder / "local" / "numbers.py").write_text("an edit while the job waits")
    (project.folder / "ranks.yaml").write_text("format: 1\ncommand: 'false'\n")
    try:
        project.site.run("scontrol", "release", str(job))
        for member in ("0", "1"):
            project.site.wait_for_end(f"{job}_{member}")
    finally:
        write_project(project.folder)
    for text in ("1e-4", "3e-4"):
        ranks, lr = project.ranks(f"ranks/lr={text}"), float(text)
        assert [rank["lr"] for rank in ranks] == [lr] * 4, project.log("ranks")
        assert [rank["world"] for rank in ranks] == ["4"] * 4
        assert [rank["host"] for rank in ranks] == ["n1", "n1", "n2", "n2"]
        assert ranks[0]["loss"] == 1 / (1 + 3 * lr)
    folder = project.folder / "output/ranks"
    archives = [path.relative_to(folder) for path in folder.rglob("project.tar")]
    assert archives == [Path("project.tar")]  # once for all runs of the sweep
    assert "finished" in project.runner("status", "output/ranks", check=False).stdout


def test_a_shell_script_with_its_own_srun_finds_the_bundle_on_each_node(project: Project) -> None:
    job = project.submit("shell", "bash run.sh", slurm={"nodes": 2})
    log = project.ended("shell", job)
    asked = sorted(path.read_text() for path in project.work("shell").glob("asked-*"))
    assert asked == ["n1 n1", "n2 n1"], log
    assert "it ended with 0" in log
    missing = (project.output("shell") / "missing.yaml").read_text()
    assert "acme/not-there" in missing, log
    said = project.status("shell")
    assert "finished" in said and said.count("acme/not-there") == 1, said
    assert said.count("asked-") == 2, said


def write_image(folder: Path) -> Path:
    """A word for srun that starts a program in an "image" in which there is no Slurm."""
    (folder / "bin").mkdir(parents=True)
    for name in ("env", "sh"):
        (folder / "bin" / name).symlink_to(str(shutil.which(name)))
    (folder / "run.sh").write_text(IMAGE_SH)
    (folder / "run.sh").chmod(0o755)
    return folder / "run.sh"


@pytest.fixture(scope="module")
def signalled(project: Project) -> dict[str, int]:
    """Jobs side by side, each with the signal that comes before the time limit."""
    waits = "python train.py --sleep_at 3 --steps 4"
    goes_on = {"resumes": True, "on_resume": "--resume_from_checkpoint latest", "slurm": ALONE}
    saves = "bash -c 'exec python train.py --sleep_at 1'"
    node = {**ALONE, "nodes": 2}
    jobs = {
        "saves": project.submit("saves", saves, on_limit="TERM", slurm=node, launch="rank"),
        "srun": project.submit("srun", OWN_SRUN, on_limit="TERM", slurm=node),
        "resumes": project.submit("resumes", f"{waits} --torn_at 9", **goes_on),
        "loops": project.submit("loops", ONLY_LOGS, **goes_on),
        "requeued": project.submit("requeued", waits, **goes_on),
        "ends": project.submit("ends", waits, slurm=ALONE),
    }
    send(project, jobs)
    return jobs


def send(project: Project, jobs: Mapping[str, int]) -> None:
    """Sends the signals when all jobs wait for them."""
    for name in jobs:
        waiting = project.work(name) / "out" / "waits-0.log"
        project.site.wait(waiting.exists, why=partial(project.log, name))
    for name, job in jobs.items():
        words = ("scancel", "--signal=USR1", "--batch", str(job))
        project.site.run(*(words if name != "requeued" else ("scontrol", "requeue", str(job))))


def test_a_command_that_resumes_is_requeued_and_goes_on_from_its_last_whole_checkpoint(
    project: Project, signalled: dict[str, int]
) -> None:
    log = project.ended("resumes", signalled["resumes"])
    assert project.site.job(signalled["resumes"])["Restarts"] == "1", log
    assert project.ranks("resumes")[0]["first"] == 2, log
    assert log.count("rank 0 step 1 ") == 1 and log.count("rank 0 step 4 ") == 1
    assert "out/checkpoint-9: half-written" in log
    assert (project.output("resumes") / "half-written/2/out/checkpoint-9/model.bin").exists()
    assert "start 2: python train.py --sleep_at 3 --steps 4 --torn_at 9" in log
    said = project.status("resumes")
    assert "finished" in said and "2 starts" in said, said


def test_a_start_that_wrote_nothing_is_not_requeued(
    project: Project, signalled: dict[str, int]
) -> None:
    log = project.ended("loops", signalled["loops"], "FAILED", "5:0")
    assert project.site.job(signalled["loops"])["Restarts"] == "0"
    assert "this start wrote no result" in log
    said = project.status("loops")
    assert "Let the command save more often" in said, said


def test_without_resumes_the_job_ends_and_says_what_would_have_been_needed(
    project: Project, signalled: dict[str, int]
) -> None:
    log = project.ended("ends", signalled["ends"], "FAILED", "5:0")
    assert "resumes: true" in log and "Set a longer slurm.time" in log
    assert "resumes: true" in project.status("ends")


@pytest.mark.parametrize("name", ["saves", "srun"])
def test_on_limit_the_ranks_get_the_signal_and_save(
    project: Project, signalled: dict[str, int], name: str
) -> None:
    log = project.ended(name, signalled[name], "FAILED", "5:0")
    saved = sorted((project.work(name) / "out").glob("saved-*"))
    assert [path.read_text() for path in saved] == ["SIGTERM"] * 2, log


def test_in_a_container_of_srun_a_command_is_ended_in_time_and_goes_on(project: Project) -> None:
    waits = "python train.py --sleep_at 3 --steps 4"
    goes_on = {"resumes": True, "on_resume": "--resume_from_checkpoint latest"}
    image = write_image(project.folder.parent / "image")
    two, one = ({**ALONE, "nodes": nodes, "srun": [str(image)]} for nodes in (2, 1))
    jobs = {
        "image": project.submit("image", waits, launch="rank", slurm=two, **goes_on),
        "once": project.submit("once", waits, slurm=one, **goes_on),
    }
    send(project, jobs)
    for name, worlds in (("image", ["2", "2"]), ("once", [None])):
        log = project.ended(name, jobs[name])
        assert project.site.job(jobs[name])["Restarts"] == "1", log
        found = project.ranks(name)
        assert found[0]["first"] == 2, log
        assert [rank["world"] for rank in found] == worlds, log
        assert "SIGUSR1 received: the command is ended when nothing is being written" in log
        assert "finished" in project.status(name)


@pytest.mark.slow
def test_torchrun_meets_on_two_nodes_and_its_ranks_alone_get_the_signal(project: Project) -> None:
    slurm = {"nodes": 2, "setup": ["export OMP_NUM_THREADS=1"]}
    torchrun = "torchrun --nproc_per_node=2 train.py --gloo"
    job = project.submit(
        "torchrun", f"{torchrun} --sleep_at 2", on_limit="TERM", slurm=slurm, resumes=True,
        on_resume="--resume_from_checkpoint latest",
    )  # fmt: skip
    out = project.work("torchrun") / "out"
    project.site.wait(
        lambda: len(list(out.glob("waits-*"))) == 4, why=lambda: project.log("torchrun")
    )
    project.site.run("scancel", "--signal=USR1", "--batch", str(job))
    log = project.ended("torchrun", job)
    assert [path.read_text() for path in sorted(out.glob("saved-*"))] == ["SIGTERM"] * 4, log
    ranks = project.ranks("torchrun")
    assert [rank["ranks"] for rank in ranks] == [4] * 4
    assert [rank["first"] for rank in ranks] == [1] * 4
    assert [rank["host"] for rank in ranks] == ["n1", "n1", "n2", "n2"]


@pytest.mark.slow
def test_a_node_that_dies_starts_the_command_again(project: Project) -> None:
    job = project.submit(
        "dies", "python train.py --sleep_at 3 --steps 4 --torn_at 9",
        resumes=True, on_resume="--resume_from_checkpoint latest", slurm=ALONE,
    )  # fmt: skip
    project.site.wait((project.work("dies") / "out" / "waits-0.log").exists)
    node = project.site.job(job)["NodeList"]
    project.site.control("kill-node", node)
    try:
        log = project.ended("dies", job)
    finally:
        project.site.control("start-node", node)
    assert project.ranks("dies")[0]["first"] == 2, log
    assert "half-written" in log


def test_scontrol_requeue_goes_on_too(project: Project, signalled: dict[str, int]) -> None:
    log = project.ended("requeued", signalled["requeued"])
    assert project.ranks("requeued")[0]["first"] == 2, log


def test_a_preempted_command_goes_on(project: Project) -> None:
    """Its step gets SIGTERM, and its launcher no signal: the site has a grace time of 30 s."""
    slurm = {**ALONE, "partition": "spare"}
    job = project.submit(
        "preempted", "python train.py --sleep_at 3 --steps 4", slurm=slurm, resumes=True,
        on_resume="--resume_from_checkpoint latest",
    )  # fmt: skip
    project.site.wait((project.work("preempted") / "out" / "waits-0.log").exists)
    words = ("--partition=batch", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=true")
    project.site.run("sbatch", *words)
    log = project.ended("preempted", job)
    assert project.ranks("preempted")[0]["first"] == 2, log
    assert "failed" not in project.status("preempted")


def test_a_rehearsal_on_the_nodes_passes_what_ends_well(project: Project) -> None:
    file = run_file(project.folder, "tried", "python train.py", slurm={"nodes": 2}, launch="rank")
    said = project.runner("rehearse", file.name, "--bundle", "../bundle", "--job").stdout
    assert "step 3 loss 0.25" in said and "it ended with exit code 0" in said, said
    file = run_file(project.folder, "tried", "python train.py --lr x", slurm=ALONE)
    refused = project.runner("rehearse", file.name, "--bundle", "../bundle", "--job", check=False)
    assert refused.returncode == 1 and "invalid float value: 'x'" in refused.stderr, refused
    assert not project.output("tried").exists()


KILLS = 20


@pytest.mark.slow
def test_kill_9_of_submit_at_20_moments_leaves_one_job(project: Project) -> None:
    run_file(project.folder, "killed", "sleep 600", slurm={**ALONE, "options": {"hold": True}})
    words = " ".join((*RUNNER, "submit", "killed.yaml", "--bundle", "../bundle"))
    for kill in range(KILLS):
        shutil.rmtree(project.output("killed"), ignore_errors=True)
        script = (
            f"cd {project.folder}; setsid {words} >/dev/null 2>&1 & p=$!; sleep {0.1 + 0.1 * kill};"
            f"kill -9 -- -$p $p; wait $p; sleep 0.2; exec {words}"
        )
        again = project.site.run("bash", "-c", script, check=False)
        jobs = project.site.run("squeue", "--me", "--name=killed", "--noheader", "--format=%i")
        assert len(jobs.stdout.split()) == 1, (kill, jobs.stdout, again.stdout, again.stderr)
        project.site.run("scancel", *jobs.stdout.split())
        project.site.wait_for_end(jobs.stdout.strip())
