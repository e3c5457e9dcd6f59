"""Clusters where names do not lead to nodes: 127.0.1.1, a management network, no names at all."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.remedies.obeyed import in_it, obeys
from tests.site.conftest import RUNNER, Site, carry, running_site
from tests.site.test_launch_on_slurm import PROGRAM

pytestmark = [pytest.mark.site, pytest.mark.xdist_group("names")]

SHORT = (
    "--set",
    "steps=4",
    "--set",
    "slurm.tasks_per_node=1",
    "--set",
    "batch.micro=4",
    "--set",
    "checkpoint.every=4",
)
ON_ONE_KIND = pytest.mark.parametrize("named", ["debian"], indirect=True)
EACH_SLOWLY = [
    "debian", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("management", "none"))
]  # fmt: skip
MEET = """\
import os, torch, torch.distributed as dist
rank, world_size = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
dist.init_process_group("gloo", rank=rank, world_size=world_size)
total = torch.tensor([float(dist.get_rank())])
dist.all_reduce(total)
print("MET", total.item(), flush=True)
dist.barrier()
dist.destroy_process_group()
"""
SHARED, LOOPBACK, APART = "10.77.0.1", "127.0.1.1", "10.88.0.1"


@dataclass(frozen=True)
class NamedSite:
    """A site, and what its nodes' names are."""

    site: Site
    kind: str

    def job(self, name: str, *lines: str) -> tuple[dict[str, str], str]:
        """Runs a user's own batch script on both nodes. Returns the job's end and its output."""
        output = self.site.home / f"{name}.out"
        head = f"#!/bin/bash\n#SBATCH --nodes=2 --ntasks-per-node=1 --output={output} --time=10"
        (self.site.home / f"{name}.sbatch").write_text("\n".join((head, *lines, "")))
        number = int(self.site.run("sbatch", "--parsable", f"{name}.sbatch").stdout)
        return self.site.wait_for_end(number), output.read_text()

    def train(self, *arguments: str, output: str) -> str:
        """The command of a short training, with the bundle in the user's home."""
        words = (
            *RUNNER,
            "train",
            "tiny.yaml",
            "--bundle",
            "bundle",
            "--output",
            output,
            *SHORT,
            *arguments,
        )
        return " ".join(words)


@pytest.fixture(scope="module", params=["debian", "management", "none"])
def named(request: pytest.FixtureRequest, staged: Path) -> Iterator[NamedSite]:
    with running_site("--names", request.param) as site:
        carry(staged, site)
        yield NamedSite(site, request.param)
        # torch's store looks up its peers; one test adds an address without a name.
        assert [
            line for line in site.leaks().splitlines() if "1.0.88.10.in-addr.arpa" not in line
        ] == []


def losses(run_folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


# Nodes on a management network train in the next test.
@pytest.mark.parametrize("named", EACH_SLOWLY, indirect=True)
def test_a_submitted_run_trains_on_two_nodes(named: NamedSite) -> None:
    output = named.site.home / "submitted"
    said = named.site.run(
        *RUNNER, "submit", "tiny.yaml", "--bundle", "bundle", "--output", str(output), *SHORT
    )
    job = named.site.job_number(said.stdout)
    ended = named.site.wait_for_end(job)
    log = (output / "logs" / f"slurm-{job}.out").read_text()
    assert ended["JobState"] == "COMPLETED", log
    assert len(losses(output)) == 4
    assert f"rank 0 listens on {SHARED}:" in log
    assert "over eth0" in log, log


@pytest.mark.parametrize("named", ["management"], indirect=True)
def test_srun_in_a_script_of_the_users_own_prepares_once_and_trains_on_two_nodes(
    named: NamedSite,
) -> None:
    ended, said = named.job("own", f"srun {named.train('--set sequence_length=32', output='own')}")
    assert ended["JobState"] == "COMPLETED", said
    assert len(losses(named.site.home / "own")) == 4
    assert (named.site.home / "own" / "config.yaml").exists()
    assert said.count("tiny.yaml: tiny, run folder") == said.count("train: prepared") == 1, said


@ON_ONE_KIND
@obeys("runner/launch/reach.py", "`ip -br address` on a compute node lists its networks; set GLOO")
def test_loopback_chosen_by_the_user_is_reported_with_the_ranks_that_cannot_connect(
    named: NamedSite,
) -> None:
    ended, said = named.job(
        "lo", "export GLOO_SOCKET_IFNAME=lo", f"exec {named.train(output='lo')}"
    )
    assert (ended["JobState"], ended["ExitCode"]) == ("FAILED", "1:0"), said
    assert "GLOO_SOCKET_IFNAME=lo: as you set it" in said
    assert re.search(
        r"rank [01] on n[12] cannot reach 127\.0\.0\.1:\d+: a loopback address, which leads back",
        said,
    ), said
    assert "The ranks never met" in said and "lost another rank" not in said
    remedy = in_it(said, r"`ip -br address` on a compute node lists .*\(slurm\.setup\)")
    show = in_it(remedy, r"(?<=`)ip [^`]*").split()
    shown = named.site.control("nexec", "n1", *show).stdout
    (interface,) = re.findall(rf"^(\w+)\S* +UP +{SHARED}/", shown, re.MULTILINE)
    names = re.findall(r"\b[A-Z_]+_(?:IFNAME|ADDR)\b", remedy)
    assert names == ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "MASTER_ADDR"]
    values = [interface, interface, SHARED]
    chosen = " ".join(f"{name}={value}" for name, value in zip(names, values, strict=True))
    rank = f"srun {sys.executable} {PROGRAM} rank . meet"
    ended, said = named.job("chosen", f"export {chosen}", rank)
    assert ended["JobState"] == "COMPLETED", said
    ranks = [json.loads((named.site.home / f"rank-{rank}.json").read_text()) for rank in range(2)]
    assert {rank["total"] for rank in ranks} == {1.0}


@pytest.mark.slow  # tests/runner/ranks/test_reach.py holds it without Slurm
@ON_ONE_KIND
def test_a_node_without_a_way_to_rank_0_says_so_and_not_to_run_it_again(named: NamedSite) -> None:
    named.site.control("nexec", "n1", "ip", "address", "add", f"{APART}/32", "dev", "lo")
    named.site.control("nexec", "n2", "ip", "route", "add", "unreachable", f"{APART}/32")
    ended, said = named.job(
        "no-way", f"export MASTER_ADDR={APART}", f"exec {named.train(output='no-way')}"
    )
    assert (ended["JobState"], ended["ExitCode"]) == ("FAILED", "1:0"), said
    assert re.search(rf"rank 1 on n2 cannot reach {APART}:\d+: no route", said), said
    assert "The ranks never met" in said and "lost another rank" not in said


@ON_ONE_KIND
def test_an_interface_that_the_nodes_lack_is_named_before_torch_is_imported(
    named: NamedSite,
) -> None:
    ended, said = named.job(
        "ib7", "export NCCL_SOCKET_IFNAME=ib7", f"exec {named.train(output='ib7')}"
    )
    assert (ended["JobState"], ended["ExitCode"]) == ("FAILED", "1:0"), said
    assert re.search(r"node n[12]: NCCL_SOCKET_IFNAME=ib7: there is no interface ib7", said), said


@ON_ONE_KIND
@pytest.mark.parametrize(
    "stale",
    [*(pytest.param(name, marks=pytest.mark.slow) for name in ("10.77.0.77", "login")), "n2"],
)
def test_a_master_left_from_another_job_is_refused_before_anything_starts(
    named: NamedSite, stale: str
) -> None:
    for how in ("exec", "srun"):
        ended, said = named.job(
            f"stale-{how}", f"export MASTER_ADDR={stale}", f"{how} {named.train(output='stale')}"
        )
        assert (ended["JobState"], ended["ExitCode"].partition(":")[0]) == ("FAILED", "2"), said
        assert f"MASTER_ADDR={stale}" in said and "Unset MASTER_ADDR" in said, said


@pytest.mark.parametrize("named", EACH_SLOWLY, indirect=True)
def test_the_usual_line_that_names_the_first_node_does_no_harm(named: NamedSite) -> None:
    first = "$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)"
    usual = f"export MASTER_ADDR={first} MASTER_PORT=29501"
    ended, said = named.job("usual", usual, f"srun {named.train(output='usual')}")
    assert ended["JobState"] == "COMPLETED", said
    assert len(losses(named.site.home / "usual")) == 4
    assert "gloo and NCCL between nodes over eth0 (10.77.0.1)" in said, said
    what = {"debian": "is 127.0.1.1", "management": "is 172.31.7.1", "none": "has no address"}[
        named.kind
    ]
    assert f"MASTER_ADDR=n1 is not used: it {what} here" in said, said


@pytest.mark.parametrize("named", EACH_SLOWLY, indirect=True)
def test_a_script_of_the_users_own_meets_itself_under_exec(named: NamedSite) -> None:
    (named.site.home / "meet.py").write_text(MEET)
    first = "$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)"
    usual = f"export MASTER_ADDR={first} MASTER_PORT=29502"
    command = f"srun {' '.join(RUNNER)} exec --bundle bundle -- {sys.executable} meet.py"
    ended, said = named.job("exec", usual, command)
    assert ended["JobState"] == "COMPLETED", said
    assert said.count("MET 1.0") == 2, said


@ON_ONE_KIND
def test_mpirun_in_a_slurm_job_makes_ranks_on_both_nodes(named: NamedSite) -> None:
    mpirun = f"{Path(sys.executable).parent / 'mpiexec.hydra'} -bootstrap slurm -n 4 -ppn 2"
    train = named.train("--set batch.micro=2", output="mpi")
    ended, said = named.job("mpi", f"{mpirun} {train}")
    assert ended["JobState"] == "COMPLETED", said
    assert "ranks started by MPICH" in said and f"rank 0 listens on {SHARED}" in said
    assert len(losses(named.site.home / "mpi")) == 4
    assert json.loads((named.site.home / "mpi" / "environment.json").read_text())["world_size"] == 4
