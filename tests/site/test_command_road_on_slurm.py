"""`--to` of a command: a project goes from a laptop into a job of a real Slurm, by a real sshd."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.lib.hub.loopback_hub import LoopbackHub
from tests.remedies.obeyed import obeys
from tests.site.conftest import Site, tiny_bert
from tests.site.road import PROGRAMS, Laptop, laptop_of
from tests.support.commands import run_file, write_project

pytestmark = [pytest.mark.site, pytest.mark.timeout(900)]
SUBMIT = ("submit", "runs/mine.yaml", "--to", "site")
COMMAND = "python train.py --output_dir out"


def write(laptop: Laptop, **keys: object) -> None:
    """The run file of the project, for one task on each of two nodes."""
    slurm = {"nodes": 2, "tasks_per_node": 1, "time": "00:10:00", "options": {"mem": "500M"}}
    more = {"manifest": "../tiny.yaml", "code": "../project", "launch": "rank", "slurm": slurm}
    given = {key: value for key, value in (more | keys).items() if value is not None}
    run_file(laptop.folder / "runs", "mine", COMMAND, **given)


@pytest.fixture
def laptop(site: Site, staged: Path, tmp_path: Path) -> Iterator[Laptop]:
    with laptop_of(site, staged, tmp_path, tmp_path.name) as laptop:
        write_project(laptop.folder / "project")
        laptop.cluster("echo 'a module greets'")
        write(laptop)
        yield laptop
        for job in laptop.jobs("mine"):
            site.run("scancel", str(job), check=False)


def test_a_project_goes_by_one_command_and_a_second_one_sends_what_differs(
    laptop: Laptop, site: Site
) -> None:
    shown = laptop.run(*SUBMIT, "--dry-run")
    assert re.search(r"^code +rsync -a .*/project/ cluster:.*/code/\w+/work/$", shown, re.MULTILINE)
    assert not laptop.work.exists()
    job = site.job_number(laptop.run(*SUBMIT))
    (laptop.folder / "project/train.py").write_text("an edit while the job waits")
    ended = site.wait_for_end(job)
    assert ended["JobState"] == "COMPLETED", laptop.run("logs", "mine", "--to", "site")
    output = laptop.work / "output/mine"
    hosts = [json.loads(path.read_text())["host"] for path in output.glob("work/out/rank-*.json")]
    assert sorted(hosts) == ["n1", "n2"]
    assert "finished" in laptop.run("status", "runs/mine.yaml", "--to", "site")
    assert "step 3 loss 0.25" in laptop.run("logs", "runs/mine.yaml", "--to", "site", "-f")

    said = laptop.run("pull", "runs/mine.yaml", "--to", "site")
    here = laptop.folder / "output/mine"
    assert "every byte compared" in said and "the command ended with exit code 0" in said, said
    assert "not brought: 9 files" in said and "work/out/checkpoint-3/" in said, said
    came = sorted(path.relative_to(here).as_posix() for path in here.rglob("*") if path.is_file())
    own = ["config.yaml", "environment.json", f"logs/slurm-{job}.out", "pulled.json"]
    assert came == [*own, "work/out/rank-0.json", "work/out/rank-1.json"]
    assert (here / own[2]).read_bytes() == (output / own[2]).read_bytes()
    last = said.rpartition("--only ")[2].strip()
    laptop.run("pull", "runs/mine.yaml", "--to", "site", "--only", last)
    assert (here / last / "model.bin").is_file() and len([*here.glob("work/out/*-*/")]) == 1
    laptop.run("pull", "mine", "--to", "site", "--checkpoints")
    assert len([*here.glob("work/out/*-*/model.bin")]) == 3
    assert "exit code 0" in laptop.run("status", "output/mine")

    write_project(laptop.folder / "project")
    again = laptop.run(*SUBMIT)  # the same project: nothing is sent, nothing is submitted
    assert re.search("^code .*# done$", again, re.MULTILINE) and "is finished" in again, again
    (archive,) = laptop.work.glob("code/*/project.tar")
    assert archive.stat().st_nlink == 2  # the run's own is another name of it
    (laptop.folder / "project/more.py").write_text("x = 1\n")
    assert site.job_number(laptop.run(*SUBMIT)) != job
    assert len([*laptop.work.glob("code/*/work/train.py")]) == 2


def test_what_ends_the_command_is_found_before_anything_is_sent(laptop: Laptop) -> None:
    (laptop.folder / "project/.env").write_text("WANDB_API_KEY=1\n")
    (laptop.folder / "project/train.py").write_text("import local.nothing\n")
    said = laptop.run(*SUBMIT, code=2)
    assert "train.py:1" in said and "local.nothing" in said, said
    assert not (laptop.work / "code").exists() and not (laptop.work / "bundle").exists()
    (laptop.folder / "project/train.py").write_text(
        "from transformers import AutoModel\nAutoModel.from_pretrained('acme/other')\n"
    )
    write(laptop, slurm={"partition": "none", "nodes": 1})
    said = laptop.run(*SUBMIT, code=2)  # Slurm there refuses the partition
    assert "private files stay here: `.env`" in said, said
    assert said.index("acme/other") < said.index("push  "), said


@obeys("runner/run_folder/project.py", "Remove it there, and run the same command again: rm -r")
def test_what_was_changed_or_damaged_there_starts_no_job(laptop: Laptop, site: Site) -> None:
    site.run("scancel", str(site.job_number(laptop.run(*SUBMIT))))
    (work,) = laptop.work.glob("code/*/work")
    script = work / "train.py"
    script.write_text(script.read_text() + "# an edit there\n")
    write(laptop, name="other")
    said = laptop.run(*SUBMIT, code=2)
    assert "a file was changed there" in said and f"rm -r {work}" in said, said
    assert laptop.jobs("other") == []
    shutil.rmtree(work)
    archive = work.with_name("project.tar")
    status = archive.stat()
    archive.write_bytes(archive.read_bytes().replace(b"step", b"stop"))
    os.utime(archive, ns=(status.st_atime_ns, status.st_mtime_ns))  # for rsync, the same file
    said = laptop.run(*SUBMIT)
    assert "the project came damaged, and is sent again" in said, said
    assert len(laptop.jobs("other")) == 1
    site.run("scancel", str(*laptop.jobs("other")))


@pytest.mark.slow
def test_a_project_goes_by_a_carried_disk(laptop: Laptop, site: Site) -> None:
    disk = site.home / f"disk-{laptop.work.name}"
    disk.mkdir()
    said = laptop.run("submit", "runs/mine.yaml", "--to", f"{disk}/")
    assert "every byte was read back" in said and (disk / "bundle").is_dir(), said
    path = ("env", f"PATH={PROGRAMS}:/usr/bin:/bin", "OMP_NUM_THREADS=1")
    go = (*path, "sh", f"{disk}/go.sh", str(laptop.work))
    went = site.run(*go).stdout
    (job,) = laptop.jobs("mine")
    assert f"job {job} is in the queue" in went, went
    assert site.wait_for_end(job)["JobState"] == "COMPLETED"
    assert "the run is finished" in site.run(*go).stdout
    assert len([*laptop.work.glob("output/mine/work/out/rank-*.json")]) == 2


NAMES_PY = """\
from huggingface_hub import hf_hub_download
NAME = "acme/tiny"
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--times", type=int)
for _ in range(parser.parse_args().times):
    hf_hub_download(NAME, "config.json")
    print("it is here")
"""
ASK_PY = """\
from huggingface_hub import hf_hub_download
hf_hub_download("-".join(["acme/other", "one"]), "config.json")
print("it is here")
"""


def test_what_a_job_missed_is_added_fetched_and_sent(
    laptop: Laptop, site: Site, tmp_path: Path
) -> None:
    """A name that is computed: no reading finds it."""
    write_project(laptop.folder / "project", ask_py=ASK_PY)
    write(laptop, command="python ask.py", launch="once", slurm={"options": {"mem": "500M"}})
    job = site.job_number(laptop.run(*SUBMIT))
    assert site.wait_for_end(job)["JobState"] == "FAILED"
    shown = laptop.run("status", "runs/mine.yaml", "--to", "site")
    assert "model: acme/other-one" in shown, shown
    with LoopbackHub(tmp_path / "hub") as hub:
        hub.repositories.commit("models", "acme/other-one", tiny_bert(tmp_path / "model"))
        laptop.variables["HF_ENDPOINT"] = hub.endpoint
        said = laptop.run(*SUBMIT, "--add")
    assert "added to tiny.yaml: other-one" in said, said
    second = site.job_number(said)
    assert second != job and site.wait_for_end(second)["JobState"] == "COMPLETED"
    assert "it is here" in laptop.run("logs", "runs/mine.yaml", "--to", "site")
    said = laptop.run(*SUBMIT, "--add")
    assert "asked for nothing that the bundle does not have" in said and "is finished" in said


@pytest.mark.slow
def test_a_command_that_needs_no_hub_goes_without_a_manifest(laptop: Laptop, site: Site) -> None:
    for name in ("tiny.yaml", "tiny.lock"):
        (laptop.folder / name).unlink()
    shutil.rmtree(laptop.folder / "bundle")
    write(laptop, manifest=None)
    said = laptop.run(*SUBMIT)
    assert "no manifest: the command gets nothing of a Hub" in said
    assert site.wait_for_end(site.job_number(said))["JobState"] == "COMPLETED"
    assert "finished" in laptop.run("status", "mine", "--to", "site")
    assert "is finished" in laptop.run(*SUBMIT)
    assert "it names no manifest" in laptop.run(*SUBMIT, "--add", code=2)


@obeys("runner/remote/begin.py", "To submit that: runner submit")
def test_a_command_alone_gets_its_run_file_and_manifest(
    laptop: Laptop, site: Site, tmp_path: Path
) -> None:
    """In a checkout that knows nothing of all this; the names are read in the code."""
    folder = write_project(laptop.folder / "theirs", ask_py=NAMES_PY)
    subprocess.run(["git", "init", "-q", folder], check=True)
    (folder / "runs").mkdir()
    shutil.copy(laptop.folder / "runs/clusters.yaml", folder / "runs")
    laptop.folder, laptop.variables["HOME"] = folder, str(tmp_path)
    on_cpu = ("--set", "slurm.options.mem=500M", "--set", "slurm.gpus_per_node=0")
    words = ("submit", "--to", "site", *on_cpu, "--")
    ask = ("python", "ask.py", "--times", "2")
    shown = laptop.run(*words[:-1], "--dry-run", "--", *ask)
    assert "would write runs/ask.yaml" in shown and not (folder / "runs/ask.yaml").exists()
    with LoopbackHub(tmp_path / "hub") as hub:
        hub.repositories.commit("models", "acme/tiny", tiny_bert(tmp_path / "model"))
        laptop.variables["HF_ENDPOINT"] = hub.endpoint
        said = laptop.run(*words, *ask)
    assert "  # ask.py:7\n" in said and "model: acme/tiny" in said, said
    job = site.job_number(said)
    assert site.wait_for_end(job)["JobState"] == "COMPLETED"
    assert "is finished" in laptop.run(*words, *ask)  # the same again: nothing is written or made
    assert laptop.run("logs", "ask", "--to", "site").count("it is here") == 2
    laptop.run("pull", "ask", "--to", "site")
    refused = laptop.run(*words, *ask[:2], code=2)
    assert "it is the run file of another command: python ask.py --times 2" in refused
    that, rm = re.findall(r"(?:: )(runner submit [^.]*\.yaml --to site|rm \S+)", refused)
    assert "is finished" in laptop.run(*that.split()[1:], *on_cpu)
    subprocess.run(rm.split(), cwd=folder, check=True)
    assert "wrote runs/ask.yaml" in laptop.run(*words, *ask)
    (folder / "local").joinpath("deep").mkdir()
    shown = laptop.run(*words[:-1], "--dry-run", "--", "torchrun", "--nproc-per-node=2", "x.py")
    assert 'command: "torchrun --nproc-per-node=2 x.py"' in shown, shown
    assert "slurm: {gpus_per_node: 2}" in shown
