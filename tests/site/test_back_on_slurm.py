"""`go.sh` and the way back, on a real Slurm: by ssh, by a carried disk, whatever is killed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from runner.remote.there import plan_text
from tests.runner.remote.far import GO
from tests.site.conftest import RUN, Site
from tests.site.road import PROGRAMS, Laptop, laptop_of
from tests.site.test_node_local_on_slurm import TREE, with_environment
from tests.site.test_road_on_slurm import hold

pytestmark = [pytest.mark.site, pytest.mark.slow, pytest.mark.timeout(900)]
LOAD = """
from transformers import AutoModelForMaskedLM, AutoTokenizer
AutoTokenizer.from_pretrained("output/my/model")
model = AutoModelForMaskedLM.from_pretrained("output/my/model")
print(sum(p.numel() for p in model.parameters()))
"""


@pytest.fixture
def laptop(site: Site, staged: Path, tmp_path: Path) -> Iterator[Laptop]:
    with laptop_of(site, staged, tmp_path, f"work-{tmp_path.name[-20:]}") as laptop:
        laptop.write()
        yield laptop
        for job in laptop.jobs("my"):
            site.run("scancel", str(job), check=False)


def own(site: Site, *paths: Path) -> None:
    """Gives files to the ordinary user of the site."""
    owner = site.home.stat()
    for path in paths:
        for one in (path, *path.rglob("*")):
            os.chown(one, owner.st_uid, owner.st_gid)


def compare(laptop: Laptop, there: Path) -> None:
    """What was brought is what is there, and it loads with plain transformers."""
    here = laptop.folder / "output/my"
    names = ["metrics.jsonl", "config.yaml", "environment.json"]
    names += [f"model/{path.name}" for path in (there / "model").iterdir()]
    assert "model/model.safetensors" in names
    for name in names:
        assert (here / name).read_bytes() == (there / name).read_bytes(), name
    done = subprocess.run(
        [PROGRAMS / "python", "-c", LOAD], cwd=laptop.folder, capture_output=True, text=True
    )
    assert int(done.stdout) > 1000, done.stderr
    assert (here / "report.html").stat().st_size > 10_000


def test_results_come_back_by_ssh(laptop: Laptop, site: Site, staged: Path, tmp_path: Path) -> None:
    job = site.job_number(laptop.run("submit", "runs/my.yaml", "--to", "site"))
    assert site.wait_for_end(job)["JobState"] == "COMPLETED"
    said = laptop.run("pull", "runs/my.yaml", "--to", "site", "--checkpoints")
    assert "every byte compared" in said and "step 40 of 40; model: output/my/model" in said
    there = laptop.work / "output/my"
    compare(laptop, there)
    newest = max((there / "checkpoints").glob("step-*"), key=lambda path: int(path.name[5:]))
    brought = [path.name for path in (laptop.folder / "output/my/checkpoints").iterdir()]
    assert brought == [newest.name] == ["step-40"]
    with laptop_of(site, staged, tmp_path / "other", laptop.work.name) as other:
        other.run("pull", "my", "--to", "site")
        compare(other, there)


@dataclass(frozen=True)
class CarriedDisk:
    """ext4 on a loop device, which the laptop and the login node mount in turn."""

    image: Path
    here: Path
    there: Path
    site: Site

    @contextmanager
    def at_the_laptop(self) -> Iterator[str]:
        subprocess.run(["mount", "-o", "loop", self.image, self.here], check=True)
        try:
            yield f"{self.here}/"
        finally:
            subprocess.run(["umount", self.here], check=True)

    @contextmanager
    def at_the_cluster(self) -> Iterator[str]:
        self.site.control("exec", "mount", "-o", "loop,noexec", str(self.image), str(self.there))
        try:
            yield str(self.there)
        finally:
            self.site.control("exec", "umount", str(self.there))


@pytest.fixture
def disk(site: Site, tmp_path: Path) -> CarriedDisk:
    disk = CarriedDisk(tmp_path / "image", tmp_path / "media", site.home / "media", site)
    with open(disk.image, "wb") as file:
        file.truncate(128 * 2**20)
    owner = site.home.stat()
    options = ["-E", f"root_owner={owner.st_uid}:{owner.st_gid}"]
    subprocess.run(["mkfs.ext4", "-q", "-F", *options, disk.image], check=True)
    disk.here.mkdir()
    disk.there.mkdir()
    return disk


def test_there_and_back_by_a_carried_disk(laptop: Laptop, site: Site, disk: CarriedDisk) -> None:
    run = laptop.folder / "runs/my.yaml"
    setup = json.dumps([f"export PATH={PROGRAMS}:$PATH", "export OMP_NUM_THREADS=1"])
    run.write_text(run.read_text().replace("slurm: {", f"slurm: {{setup: {setup}, "))
    with disk.at_the_laptop() as media:
        said = laptop.run("submit", "runs/my.yaml", "--to", media)
        assert f"on the cluster: sh {media}go.sh FOLDER" in said
    with disk.at_the_cluster() as media:
        done = site.run("sh", f"{media}/go.sh", str(laptop.work), check=False)
        log = (laptop.work / ".airlift/log").read_text()
        assert done.returncode == 0, f"{done.stderr}{log}"
        (job,) = laptop.jobs("my")
        assert f"job {job} is in the queue" in done.stdout
        assert site.run("sh", f"{media}/go.sh", str(laptop.work)).returncode == 0
        assert laptop.jobs("my") == [job]
    assert site.wait_for_end(job)["JobState"] == "COMPLETED"
    assert "nothing was submitted" in site.run("sh", str(laptop.work / "go.sh")).stdout
    assert laptop.jobs("my") == [job]
    with disk.at_the_cluster() as media:
        site.run("sh", str(laptop.work / "go.sh"), "--results", media)
    with disk.at_the_laptop() as media:
        laptop.run("pull", "runs/my.yaml", "--to", media)
    compare(laptop, laptop.work / "output/my")


@pytest.fixture
def folder(site: Site, staged: Path, tmp_path: Path) -> Path:
    """A cluster's folder, with an environment in the bundle. Its python prints a line first."""
    work = site.home / f"walk-{tmp_path.name[-20:]}"
    (work / ".airlift").mkdir(parents=True)
    bundle_id = with_environment(staged, work / "bundle")
    run = RUN[: RUN.index("slurm:")] + "slurm: {nodes: 1, tasks_per_node: 1, time: '00:10:00'}\n"
    (work / "runs").mkdir()
    (work / "runs/my.yaml").write_text(run.replace("name: tiny", "name: my"))
    shutil.copy(GO, work)
    plan(work, BUNDLE_ID=bundle_id)
    own(site, work)
    return work


def plan(work: Path, **changes: str) -> None:
    keys = {
        "WALK": "w0", "RUN": "my.yaml", "OUTPUT": "output/my", "ENVIRONMENT": "train-env",
        "ENV_DIGEST": TREE, **changes,
    }  # fmt: skip
    (work / ".airlift/plan").write_text(plan_text(keys))


def jobs(site: Site, name: str) -> list[str]:
    return site.run("squeue", "--states=all", "-h", f"--name={name}", "-o", "%i").stdout.split()


def detached(site: Site, work: Path) -> int:
    """Starts go.sh as a laptop does; the number of its session on the login node."""
    script = f"cd {work} && {{ setsid nohup sh go.sh </dev/null >/dev/null 2>&1 & }}; echo $!"
    return int(site.run("sh", "-c", script).stdout)


def test_killed_at_ten_moments_there_is_one_job(site: Site, folder: Path) -> None:
    steps, output = folder / ".airlift/steps", folder / "output/my"
    text = (folder / ".airlift/plan").read_text()
    moments: list[int | str] = [1, 2, 3, 4, 5, 6, 7, "submit.intent", "submitted", 8]
    before = jobs(site, "my")
    hold(site, True)
    try:
        for number, moment in enumerate(moments):
            (folder / ".airlift/plan").write_text(text.replace("WALK=w0", f"WALK=w{number}"))
            session = detached(site, folder)

            def has_come(number: int = number, moment: int | str = moment) -> bool:
                lines = steps.read_text().splitlines() if steps.exists() else []
                ours = sum(line.startswith(f"w{number} ") for line in lines)
                if isinstance(moment, str):
                    return ours >= 8 or (ours > 0 and (output / moment).exists())
                return ours >= moment

            site.wait(has_come, why=(folder / ".airlift/log").read_text)
            site.run("bash", "-c", f"kill -9 -- -{session}")
            if (lock := folder / ".airlift/lock").exists():
                for path in (lock, *lock.glob("beat")):
                    os.utime(path, (time.time() - 20, time.time() - 20))
        done = site.run("sh", str(folder / "go.sh"), check=False)
        assert done.returncode == 0, done.stderr + (folder / ".airlift/log").read_text()
        (job,) = set(jobs(site, "my")) - {*before}
        assert (folder / ".airlift/result").read_text().split()[1:] == ["0", job]
        prefix = folder / f"envs/train-env-{TREE[:16]}"
        assert f"runs {prefix}/bin/python" in (folder / ".airlift/log").read_text()
    finally:
        hold(site, False)
        site.run("scancel", "-n", "my")


def test_every_byte_is_read_in_a_job_where_login_nodes_kill(site: Site, folder: Path) -> None:
    bundle_id = (folder / ".airlift/plan").read_text().split("BUNDLE_ID=")[1].split("\n")[0]
    plan(folder, BUNDLE_ID=bundle_id, VERIFY="job", PARTITION="batch", TIME="00:05:00")
    hold(site, True)
    before = jobs(site, "airlift-verify")
    session = detached(site, folder)
    site.wait((folder / ".airlift/verify-job").exists)
    site.run("bash", "-c", f"kill -9 -- -{session}")
    hold(site, False)
    for path in ((lock := folder / ".airlift/lock"), *lock.glob("beat")):
        os.utime(path, (time.time() - 20, time.time() - 20))
    done = site.run("sh", str(folder / "go.sh"), check=False)
    log = (folder / ".airlift/log").read_text()
    assert done.returncode == 0, done.stderr + log
    (job,) = set(jobs(site, "airlift-verify")) - {*before}
    assert f"job {job} verifies" in log and f"bundle id {bundle_id}" in log
    assert list((folder / ".airlift/state/airlift/receipts").glob("*.json"))
    assert "verify done 0" in (folder / ".airlift/steps").read_text()
    site.run("scancel", "-n", "my")
    # Its receipt holds: no second one. Damage is found by the job, too.
    site.run("sh", str(folder / "go.sh"))
    assert "verify skipped 0" in (folder / ".airlift/steps").read_text()
    weights = next((folder / "bundle/data/models").rglob("model.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    done = site.run("sh", str(folder / "go.sh"), check=False)
    assert done.returncode == 1 and "model.safetensors" in (folder / ".airlift/damaged").read_text()
    site.run("scancel", "-n", "my")
