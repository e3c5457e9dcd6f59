"""`--to`: from a laptop into the queue of a real Slurm, by a real sshd, as an ordinary user."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from stage.bundle.bundle import verify
from tests.site.conftest import Site
from tests.site.road import Laptop, laptop_of

pytestmark = [pytest.mark.site, pytest.mark.timeout(900)]
SUBMIT = ("submit", "runs/my.yaml", "--to", "site")


@pytest.fixture
def laptop(site: Site, staged: Path, tmp_path: Path) -> Iterator[Laptop]:
    with laptop_of(site, staged, tmp_path, tmp_path.name) as laptop:
        laptop.write()
        yield laptop
        for job in (*laptop.jobs("my"), *laptop.jobs("other")):
            site.run("scancel", str(job), check=False)


def test_the_road_from_a_bundle_to_the_end_of_the_job(laptop: Laptop, site: Site) -> None:
    said = laptop.run(*SUBMIT)
    job = site.job_number(said)
    for name in ("lock", "fetch"):
        assert re.search(rf"^{name} .*# done$", said, re.MULTILINE), said
    assert "stage push bundle" in said and said.count("nothing found that would fail") == 1
    assert "next: runner submit" not in said  # it is done by the road
    shown = json.loads(laptop.run("status", "output/my", "--to", "site", "--json"))
    assert shown["job"]["id"] == job
    assert laptop.jobs("my") == [job]
    followed = laptop.run("logs", "runs/my.yaml", "--to", "site", "-f")
    assert "step" in followed and site.state(job) in ("COMPLETED", "COMPLETING")
    assert "my" in laptop.run("status", "--to", "site")
    shown = laptop.run(*SUBMIT, "--dry-run")  # the run is finished
    assert len(re.findall(r"# done$", shown, re.MULTILINE)) == 7, shown
    assert "next: runner pull runs/my.yaml --to site" in shown
    again = laptop.run(*SUBMIT)
    assert "is finished: nothing was submitted" in again and "-- check" not in again
    other = laptop.write("other")  # only a run file is new
    again = laptop.run("submit", f"runs/{other.name}", "--to", "site")
    assert re.search("^push .*# done$", again, re.MULTILINE), again
    assert [site.job_number(again)] == laptop.jobs("other") != [job]
    assert laptop.logins == 1
    assert verify(laptop.work / "bundle").bundle_id == verify(laptop.folder / "bundle").bundle_id


@pytest.mark.slow
def test_a_transfer_host_carries_and_a_job_verifies(laptop: Laptop, site: Site) -> None:
    laptop.cluster(more="  copy: dtn\n  verify: job\n")
    said = laptop.run(*SUBMIT)
    assert laptop.logins == 2
    (number,) = re.findall(r"^job (\d+) verifies$", said, re.MULTILINE)
    assert site.job(number)["JobName"] == "airlift-verify" and site.state(number) == "COMPLETED"
    assert re.findall(r"^job (\d+): ", said, re.MULTILINE) == [str(*laptop.jobs("my"))]
    assert re.search("^verify .*# done$", laptop.run(*SUBMIT, "--dry-run"), re.MULTILINE)


def hold(site: Site, is_on: bool) -> None:
    """Lets no job begin."""
    state = "down" if is_on else "up"
    site.control("exec", "scontrol", "update", "partitionname=batch", f"state={state}")


@pytest.mark.slow
def test_two_laptops_at_once_make_one_job(
    laptop: Laptop, site: Site, staged: Path, tmp_path: Path
) -> None:
    with laptop_of(site, staged, tmp_path / "other", laptop.work.name) as other:
        other.write()
        both = [laptop.start(*SUBMIT), other.start(*SUBMIT)]
        said = [process.communicate(timeout=300)[0] for process in both]
        assert [process.returncode for process in both] == [0, 0], said
        jobs = {re.findall(r"^job (\d+)", text, re.MULTILINE)[-1] for text in said}
    assert [str(job) for job in laptop.jobs("my")] == [*jobs], said
    assert verify(laptop.work / "bundle").bundle_id == verify(laptop.folder / "bundle").bundle_id


@pytest.mark.slow
def test_what_is_damaged_there_is_sent_again(laptop: Laptop, site: Site) -> None:
    job = site.job_number(laptop.run(*SUBMIT))
    site.run("scancel", str(job))
    site.wait_for_end(job)
    weights = next(laptop.work.glob("bundle/data/models/*/model.safetensors"))
    status = weights.stat()
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))  # for rsync, the same file
    said = laptop.run(*SUBMIT)
    assert "what is damaged there is sent again" in said, said
    assert verify(laptop.work / "bundle").ok and len(laptop.jobs("my")) == 2
