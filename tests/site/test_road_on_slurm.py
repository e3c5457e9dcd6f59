"""`--to`: from a laptop into the queue of a real Slurm, by a real sshd, as an ordinary user."""

from __future__ import annotations

import json
import os
import re
import shlex
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from stage.bundle.verify import verify
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
def test_a_second_factor_is_typed_once_for_submit_status_and_logs(laptop: Laptop) -> None:
    laptop.ask_for("246810")
    assert "Log in once in a terminal" in laptop.run(*SUBMIT, code=5)
    said = laptop.at_terminal("246810", *SUBMIT)
    said += laptop.at_terminal("never typed", "status", "--to", "site")
    said += laptop.at_terminal("never typed", "logs", "runs/my.yaml", "--to", "site", "-f")
    assert said.count("assword:") == laptop.logins == 1, said
    assert "next: runner pull" in said and len(laptop.jobs("my")) == 1


@pytest.mark.slow
def test_a_transfer_host_carries_and_a_job_verifies(laptop: Laptop, site: Site) -> None:
    laptop.cluster(more="  copy: dtn\n  verify: job\n")
    said = laptop.run(*SUBMIT)
    assert laptop.logins == 2
    (number,) = re.findall(r"^job (\d+) verifies$", said, re.MULTILINE)
    assert site.job(number)["JobName"] == "airlift-verify" and site.state(number) == "COMPLETED"
    assert re.findall(r"^job (\d+): ", said, re.MULTILINE) == [str(*laptop.jobs("my"))]
    assert re.search("^verify .*# done$", laptop.run(*SUBMIT, "--dry-run"), re.MULTILINE)


@pytest.mark.slow  # it measures seconds
def test_a_second_submit_makes_no_second_job_and_takes_seconds(laptop: Laptop, site: Site) -> None:
    hold(site, True)
    try:
        assert "not asked what it has" in laptop.run(*SUBMIT, "--dry-run")
        assert not laptop.work.exists()
        job = site.job_number(laptop.run(*SUBMIT))
        shown = laptop.run(*SUBMIT, "--dry-run")
        assert (
            len(re.findall(r"# done$", shown, re.MULTILINE)) == 7 and "to send: about 0 B" in shown
        )
        began = time.monotonic()
        again = laptop.run(*SUBMIT)
        took = time.monotonic() - began
        assert re.search(r"^submit .*# done$", again, re.MULTILINE), again
        assert f"job {job} (pending)" in again and laptop.jobs("my") == [job]
        assert took < 5, f"{took:.1f} s"
        # Another text of the run file would be read by the job that waits.
        run = laptop.folder / "runs/my.yaml"
        run.write_text(run.read_text().replace("5.0e-3", "1.0e-3"))
        refused = laptop.run(*SUBMIT, code=2)
        assert f"job {job} (pending)" in refused and f"scancel {job}" in refused
        assert "5.0e-3" in (laptop.work / "runs/my.yaml").read_text()
    finally:
        hold(site, False)


def hold(site: Site, is_on: bool) -> None:
    """Lets no job begin."""
    state = "down" if is_on else "up"
    site.control("exec", "scontrol", "update", "partitionname=batch", f"state={state}")


@pytest.mark.slow
def test_an_sbatch_that_reports_a_time_out_although_the_job_is_queued(
    laptop: Laptop, site: Site
) -> None:
    fake, real = site.home / "fake", "/usr/bin/sbatch"
    fake.mkdir(exist_ok=True)
    mark = fake / "timed-out"
    mark.unlink(missing_ok=True)
    says = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"
    lines = [
        "#!/bin/sh",
        f"case $* in *--parsable*) if [ ! -e {mark} ]; then",
        f'{real} "$@" >/dev/null; : >{mark}; echo "{says}" >&2; exit 1; fi ;; esac',
        f'exec {real} "$@"',
    ]
    (fake / "sbatch").write_text("\n".join(lines) + "\n")
    (fake / "sbatch").chmod(0o755)
    fake.chmod(0o777)
    laptop.cluster(f"export PATH={shlex.quote(str(fake))}:$PATH")
    said = laptop.run(*SUBMIT)
    assert mark.exists() and laptop.jobs("my") == [site.job_number(said)]
    laptop.run(*SUBMIT)
    assert len(laptop.jobs("my")) == 1


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
def test_what_check_finds_is_shown_and_nothing_is_queued(laptop: Laptop) -> None:
    run = laptop.folder / "runs/my.yaml"
    sound = run.read_text()
    run.write_text(sound.replace("asset: reference", "asset: referense"))
    assert "referense" in laptop.run(*SUBMIT, code=2)
    assert not laptop.work.exists()  # found here, before anything was sent
    run.write_text(sound.replace("micro: 2", "micro: 3"))
    said = laptop.run(*SUBMIT, code=2)
    assert "-- check" in said and "batch" in said and laptop.jobs("my") == []


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


@pytest.mark.slow
def test_a_sweep_from_a_login_node_whose_shell_greets(laptop: Laptop, site: Site) -> None:
    greeting = site.home / ".bashrc"
    greeting.write_text("echo; echo 'Welcome to alpha'; echo state=none\n")
    greeting.chmod(0o644)
    hold(site, True)
    try:
        sweep = (*SUBMIT, "--array", "seed=1,2")
        job = site.job_number(laptop.run(*sweep).rpartition("\n-- submit")[2])
        assert f"job {job} (pending)" in laptop.run(*sweep) and set(laptop.jobs("my")) == {job}
        shown = json.loads(laptop.run("status", "--to", "site", "--json"))
        assert {run["state"] for run in shown["runs"]} == {"waiting"}, shown
    finally:
        greeting.unlink()
        hold(site, False)
