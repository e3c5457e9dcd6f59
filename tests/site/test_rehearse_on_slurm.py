"""`runner rehearse --job`: the nodes of a partition are tried."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.remedies.obeyed import obeys
from tests.site.conftest import RUNNER, Site

pytestmark = pytest.mark.site

RUN = ("tiny.yaml", "--bundle", "bundle", "--set", "slurm.tasks_per_node=1")
SMALL = ("--set", "batch.micro=4")


@obeys("runner/job/access.py", "Use a folder on the shared disk; `runner rehearse RUN --bundle B")
@obeys(
    "runner/trials/rehearse_job.py", "Choose an --output on a disk that the nodes share: `df -T`"
)
def test_a_partition_passes_its_rehearsal(site: Site, bundle: Path) -> None:
    """First with a run folder that the nodes do not see: in the login node's memory."""
    unseen = ("--output", "/dev/shm/nowhere/run")
    done = site.run(*RUNNER, "rehearse", *RUN, *SMALL, *unseen, "--job", check=False)
    assert done.returncode == 2, f"{done.stdout}\n{done.stderr}"
    assert "nodes do not see /dev/shm/nowhere" in done.stderr

    output = ("--output", str(site.home / "output" / "rehearsed"))
    done = site.run(*RUNNER, "rehearse", *RUN, *SMALL, *output, "--job", check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "n1: n1 reaches 1 of 1 nodes" in done.stdout
    assert "n2: n2 reaches 1 of 1 nodes" in done.stdout
    assert "over 2 ranks (gloo)" in done.stdout
    assert not list((site.home / "output").glob(".rehearsed.rehearsal-*"))
