"""`stage env probe --to` with a real Slurm: a node answers, at once or later."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from stage.environment.spec.profile import Profile
from tests.remedies.obeyed import in_it
from tests.site.conftest import Site
from tests.site.road import PROGRAMS, Laptop, laptop_of

pytestmark = [pytest.mark.site, pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture
def laptop(site: Site, staged: Path, tmp_path: Path) -> Iterator[Laptop]:
    with laptop_of(site, staged, tmp_path, "probed") as laptop:
        yield laptop


def probe(laptop: Laptop, to: str) -> str:
    done = subprocess.run(
        [PROGRAMS / "stage", "env", "probe", "--to", to],
        cwd=laptop.folder,
        env=laptop.environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_node_that_is_busy_answers_later(laptop: Laptop, site: Site) -> None:
    site.control("exec", "scontrol", "update", "partitionname=batch", "state=down")
    try:
        said = probe(laptop, f"cluster:{laptop.work}")
    finally:
        site.control("exec", "scontrol", "update", "partitionname=batch", "state=up")
    job = in_it(said, r"(?<=job )\d+(?= has not answered)")
    assert "assumed until a node answers: glibc, linux, cuda, compute_capability" in said
    profile = laptop.folder / "envs/profiles/cluster.yml"
    assert (Profile.load(profile).cuda, Profile.load(profile).glibc[:2]) == ("12.2", "2.")
    site.wait_for_end(job)
    assert f"{profile}: written" in probe(laptop, "cluster")
    assert not site.run("squeue", "-h").stdout
    assert "assumed" not in profile.read_text() and "# Profile of n" in profile.read_text()
    assert not list(laptop.work.glob(".airlift-probe*"))
