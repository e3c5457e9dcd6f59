"""Clusters where names do not lead to nodes: 127.0.1.1, a management network."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.site.conftest import RUNNER, Site, carry, running_site
from tests.site.test_train_on_slurm import losses

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
SHARED = "10.77.0.1"


@dataclass(frozen=True)
class NamedSite:
    """A site whose nodes have such names."""

    site: Site

    def job(self, name: str, *lines: str) -> tuple[dict[str, str], str]:
        """Runs a user's own batch script on both nodes. Returns the job's end and its output."""
        output = self.site.home / f"{name}.out"
        head = f"#!/bin/bash\n#SBATCH --nodes=2 --ntasks-per-node=1 --output={output} --time=10"
        (self.site.home / f"{name}.sbatch").write_text("\n".join((head, *lines, "")))
        number = int(self.site.run("sbatch", "--parsable", f"{name}.sbatch").stdout)
        return self.site.wait_for_end(number), output.read_text()

    def lines(self, *arguments: str, output: str) -> list[str]:
        """The lines of a short training whose ranks a srun of the user's own starts."""
        prepare, train = (self.command(n, *arguments, output=output) for n in ("prepare", "train"))
        return [prepare, f"srun {train}"]

    def command(self, name: str, *arguments: str, output: str) -> str:
        """A command on a short training, with the bundle in the user's home."""
        words = (
            *RUNNER,
            name,
            "tiny.yaml",
            "--bundle",
            "bundle",
            "--output",
            output,
            *SHORT,
            *arguments,
        )
        return " ".join(words)


@pytest.fixture(scope="module", params=["debian", "management"])
def named(request: pytest.FixtureRequest, staged: Path) -> Iterator[NamedSite]:
    with running_site("--names", request.param) as site:
        carry(staged, site)
        yield NamedSite(site)
        assert site.leaks() == ""


@pytest.mark.parametrize("named", ["debian"], indirect=True)
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
    ended, said = named.job("own", *named.lines("--set sequence_length=32", output="own"))
    assert ended["JobState"] == "COMPLETED", said
    assert len(losses(named.site.home / "own")) == 4
    assert (named.site.home / "own" / "config.yaml").exists()
    assert said.count("tiny.yaml: tiny, run folder") == said.count("train: prepared") == 1, said


@pytest.mark.parametrize("named", ["debian"], indirect=True)
def test_the_usual_line_that_names_the_first_node_does_no_harm(named: NamedSite) -> None:
    first = "$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)"
    usual = f"export MASTER_ADDR={first} MASTER_PORT=29501"
    ended, said = named.job("usual", usual, *named.lines(output="usual"))
    assert ended["JobState"] == "COMPLETED", said
    assert len(losses(named.site.home / "usual")) == 4
    assert "gloo and NCCL between nodes over eth0 (10.77.0.1)" in said, said
    assert "MASTER_ADDR=n1 is not used: it is 127.0.1.1 here" in said, said
