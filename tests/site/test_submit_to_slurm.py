"""`runner submit` with a real sbatch: it finds first what Slurm would reject now or later."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.remedies.obeyed import obeys
from tests.site.conftest import RUNNER, Site
from tests.site.test_launch_on_slurm import PROGRAM

pytestmark = pytest.mark.site
HERE = "runner/job/submit.py"


class Refused(NamedTuple):
    """A request that Slurm refuses, and how its remedy is obeyed.

    Attributes:
        wrong: fields of the request.
        says: a part of the message.
        remedy: a part of the remedy.
        shows: what the remedy's own commands print (a regular expression).
        right: the fields that are obeyed with; `{}` is the group of `shows`.
    """

    wrong: dict[str, Any]
    says: str
    remedy: str
    shows: str
    right: dict[str, Any]


NO_NODE = "node configuration is not available"
ONE = {"nodes": 1, "tasks_per_node": 1}
TIGHT = {**ONE, "partition": "tight", "time": "5"}
OF_TIGHT = r"PartitionName=tight(?:.*\n)*?.*"
TWO = {**ONE, "partition": "spare,tight"}
REFUSED = (
    Refused({"partition": "gpu"}, "invalid partition specified: gpu",
            "See `sinfo -s` for the partitions", r"^(spare)", {"partition": "{}"}),
    Refused({"gpus_per_node": 9}, NO_NODE, "See `sinfo -N -o '%P %n %c %m %G'`: no node has",
            r"gpu:null:(\d)", {"gpus_per_node": 2}),
    Refused({"options": {"gres": "gpu:a800:1"}}, NO_NODE, "`sinfo -N -o '%P %n %c %m %G'`",
            r"(gpu:null:2)", {"options": {"gres": "{}"}}),
    Refused({"options": {"gres": "foo:1"}}, "Invalid generic resource", "See `sinfo -o '%P %G'`",
            r"(gpu:null:2)", {"options": {"gres": "{}"}}),
    Refused({"nodes": 3}, NO_NODE, "Lower slurm.nodes: it is 3", "", {"nodes": 2}),
    Refused({"options": {"constraint": "volta"}}, "Invalid feature", "See `sinfo -o '%P %f'`",
            r"batch\* \(null\)", {}),
    Refused({**ONE, "options": {"nodelist": "n77"}}, "Invalid node name", "See `sinfo -N`",
            r"^(n2)", {**ONE, "options": {"nodelist": "{}"}}),
    Refused({"options": {"dependency": "afterok:0"}}, "dependency", "See `squeue --me`: the job in",
            r"JOBID.*\n\Z", {}),
    Refused({"options": {"mail-type": "NOPE"}}, "Invalid --mail-type", "Correct `slurm:` in the",
            "", {"options": {"mail-type": "END"}}),
    Refused({"options": {"no-such-option": "1"}}, "unrecognized option", "Correct slurm.options",
            "", {}),
    Refused({"time": "3-00:00:00"}, "more than partition batch allows, 2-00:00:00",
            "requeued and resumes", "", {"time": "2-00:00:00"}),
    Refused({"time": "1h"}, "'1h' is not a time limit", "HH:MM:SS", "", {"time": "01:00:00"}),
)  # fmt: skip


LIMITS = """
EnforcePartLimits=ALL
PartitionName=tight Nodes=n1 MaxTime=5 MaxMemPerNode=1000 MaxCPUsPerNode=1
PartitionName=small Nodes=ALL MaxNodes=1
PartitionName=closed Nodes=ALL State=INACTIVE
"""
REFUSED_BY_LIMITS = (
    Refused({}, "No partition specified", "This cluster has no default partition: see `sinfo -s`",
            r"^(batch) ", {"partition": "{}"}),
    Refused({"partition": "closed"}, "Required partition not available", "`sinfo -s` shows which",
            r"^(spare) +up", {"partition": "{}"}),
    Refused({"partition": "small"}, "Node count", "See `sinfo -s`, and lower slurm.nodes",
            r"^(small)", {"partition": "{}", "nodes": 1}),
    Refused({**TWO, "time": "9"}, "time limit", "See `sinfo -o '%P %l'`", r"^tight (5):00",
            {**TWO, "time": "{}"}),
    Refused({**TIGHT, "options": {"mem": "2000"}}, "Memory required", "for a lower limit (MaxMem",
            OF_TIGHT + r"MaxMemPerNode=(\d+)", {**TIGHT, "options": {"mem": "{}"}}),
    Refused({**TIGHT, "options": {"cpus-per-task": 3}}, "More processors", "limit (MaxCPUsPerNode)",
            OF_TIGHT + r"MaxCPUsPerNode=(\d+)", {**TIGHT, "options": {"cpus-per-task": "{}"}}),
)  # fmt: skip


def judged(site: Site, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What is found of each request before it is submitted."""
    words = (PROGRAM, "judge", str(site.home / "refused"), "meet", json.dumps(requests))
    return [json.loads(line) for line in site.python(*words).stdout.splitlines()]


def obey(site: Site, refused: Sequence[Refused]) -> None:
    """Each request is refused, and accepted when its remedy was obeyed."""
    right = []
    for case, found in zip(refused, judged(site, [c.wrong for c in refused]), strict=True):
        ((message, remedy),) = found["errors"]
        assert case.says in message and case.remedy in remedy, (message, remedy)
        commands = re.findall(r"`((?:sinfo|squeue|scontrol) [^`]*)`", remedy)
        shown = site.run("bash", "-c", "; ".join(commands)).stdout
        match = re.search(case.shows, shown, re.MULTILINE)
        assert match, f"{case.shows} in {shown}"
        text = json.dumps(case.right).replace("{}", match[1]) if match.groups() else ""
        right.append(json.loads(text) if text else case.right)
    for case, found in zip(refused, judged(site, right), strict=True):
        assert found["errors"] == [] and "accepts it" in found["lines"][-1], (case, found)


@obeys(HERE, "Correct `slurm:`", "See `sinfo -N -o '%P %n %c %m %G'`", "See `sinfo -o '%P %f'`")
@obeys(HERE, 'set slurm.gpus_per_node or slurm.options: {gres: "gpu:TYPE:N"}.')
@obeys(HERE, "See `sinfo -N`, and", "See `sinfo -s` for the partitions", "See `squeue --me`: the")
def test_a_job_that_could_not_start_is_refused_with_the_way_out(site: Site) -> None:
    obey(site, REFUSED)
    folder = site.home / "refused"
    refused = site.python(PROGRAM, "submit", str(folder), "meet", "nodes=3", check=False)
    assert refused.returncode == 2 and "Lower slurm.nodes: it is 3" in refused.stderr
    assert site.run("squeue", "--noheader").stdout == "" and not folder.exists()


def test_the_memory_of_a_job_that_asks_for_none_is_foretold(site: Site, bundle: Path) -> None:
    said = site.run(*RUNNER, "check", "tiny.yaml", "--bundle", "bundle").stdout
    assert "DefMemPerCPU of slurm.conf, 1000 MB x 4 CPUs; slurm.options asks for no mem" in said
    assert "asks for no GPU, and each node of partition batch has some" in " ".join(said.split())
    shape = ("--nodes=2", "--ntasks-per-node=2", "--cpus-per-task=2", "--hold", "--wrap=true")
    job = site.job(site.run("sbatch", "--parsable", *shape).stdout.strip())
    site.run("scancel", job["JobId"])
    assert (job["MinMemoryCPU"], job["NumCPUs"]) == ("1000M", "8"), job


@obeys(HERE, "This cluster has no default partition", "`sinfo -s` shows which partitions are up")
@obeys(HERE, "See `sinfo -s`, and lower slurm.nodes.", "See `sinfo -o '%P %l'` for the limits")
@obeys(HERE, "See `sinfo -N -o '%n %m'`", "See `sinfo -N -o '%n %c'`")
def test_what_a_partitions_limits_refuse_is_refused_with_the_way_out(site: Site) -> None:
    file = site.folder / "etc/slurm.conf"
    before = file.read_text()
    file.write_text(before.replace("Default=YES", "Default=NO") + LIMITS)
    try:
        site.control("exec", "scontrol", "reconfigure")
        obey(site, REFUSED_BY_LIMITS)
    finally:
        file.write_text(before)
        site.control("exec", "scontrol", "reconfigure")


# ---- exactly one job: two at once, an answer of sbatch that is lost, a queue that cannot be read

REAL = {name: shutil.which(name) for name in ("sbatch", "squeue")}
TIMED_OUT = "Batch job submission failed: Socket timed out on send/recv operation"
# How an sbatch ends whose job is in the queue all the same (toil#5459).
LOST = {
    "timed out": f"echo 'sbatch: error: {TIMED_OUT}' >&2; exit 1",
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
