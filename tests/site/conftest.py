"""One real Slurm for all tests here: scripts/slurm-site, two nodes, a normal user, no way out."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from scripts.lib import site as slurm_site
from scripts.lib.demo.repositories import dataset_files, model_folder
from scripts.lib.hub.loopback_hub import LoopbackHub
from tests.support.staging import fetch_bundle

REPOSITORY = slurm_site.ROOT
USER = slurm_site.USER
MANIFEST = """\
format: 1
name: tiny
assets:
  tiny-bert: {model: acme/tiny-bert}
  reference: {dataset: acme/reference, config: chapters}
"""
RUN = """\
format: 1
name: tiny
task: masked-lm
model: {asset: tiny-bert}
dataset: {asset: reference}
sequence_length: 64
steps: 40
batch: {global: 16, micro: 2}
optimizer: {lr: 5.0e-3}
precision: fp32
checkpoint: {every: 10, keep: 2}
slurm: {nodes: 2, tasks_per_node: 2, time: "00:10:00", setup: ["export OMP_NUM_THREADS=1"]}
"""
RUNNER = (str(Path(sys.executable).parent / "runner"),)


@dataclass(frozen=True)
class Site:
    """A running site. Commands run on its login node as the ordinary user, in their home."""

    folder: Path

    @property
    def home(self) -> Path:
        return slurm_site.home_of(self.folder)

    def control(
        self, *arguments: str, check: bool = True, cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """scripts/slurm-site itself."""
        return slurm_site.control(self.folder, *arguments, check=check, cwd=cwd)

    def run(self, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """A command of the user on the login node."""
        done = self.control("exec", "-u", USER, *command, check=False, cwd=self.home)
        assert not check or done.returncode == 0, (
            f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        )
        return done

    def python(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """The interpreter that runs the tests, as the user."""
        return self.run(sys.executable, *arguments, check=check)

    def job(self, number: int | str) -> dict[str, str]:
        """The fields that Slurm reports for a job."""
        shown = self.run("scontrol", "show", "job", str(number), "--oneliner").stdout
        return dict(word.partition("=")[::2] for word in shown.split())

    def state(self, number: int | str) -> str:
        return self.job(number)["JobState"]

    def wait_for_end(self, number: int | str, seconds: float = 240) -> dict[str, str]:
        """Waits until the job has ended finally (a requeued job is PENDING meanwhile)."""
        over = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}
        self.wait(lambda: self.state(number) in over, seconds, lambda: str(self.job(number)))
        return self.job(number)

    def wait(
        self, condition: Callable[[], bool], seconds: float = 120, why: Callable[[], str] = str
    ) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, (
                f"waited in vain: {why()}\n{self.control('status').stdout}"
            )
            time.sleep(0.2)

    def leaks(self) -> str:
        """The packets that tried to leave the site."""
        return self.control("leaks", check=False).stdout

    def job_number(self, text: str) -> int:
        match = re.search(r"\bjob (\d+)|^(\d+)$", text, re.MULTILINE)
        assert match, f"no job number in {text!r}"
        return int(match[1] or match[2])


@contextmanager
def running_site(*options: str) -> Iterator[Site]:
    """A site with two nodes, from its start to its end; options of `scripts/slurm-site up`."""
    if lacks := slurm_site.lacking():
        pytest.skip(f"scripts/slurm-site needs {lacks}")
    with slurm_site.running_site(*options) as folder:
        yield Site(folder)


@pytest.fixture(scope="session")
def site() -> Iterator[Site]:
    with running_site("--gpus", "2") as running:
        yield running


def tiny_bert(folder: Path) -> dict[str, bytes]:
    """A model repository: BERT, two layers of 32, random weights, the demo model's tokenizer."""
    import torch
    from transformers import AutoTokenizer, BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(model_folder())
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    BertForMaskedLM(BertConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="session")
def staged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle on the laptop, of `tiny.yaml` from a Hub."""
    laptop = tmp_path_factory.mktemp("laptop")
    (laptop / "tiny.yaml").write_text(MANIFEST)
    with LoopbackHub(laptop / "hub") as hub:
        model = tiny_bert(tmp_path_factory.mktemp("model"))
        hub.repositories.commit("models", "acme/tiny-bert", model)
        hub.repositories.commit("datasets", "acme/reference", dataset_files())
        return fetch_bundle(laptop, "tiny", hub.endpoint)


def carry(staged: Path, site: Site) -> Path:
    """Carries a bundle to the user's home on the cluster, with a run file beside it."""
    carried = site.home / "bundle"
    subprocess.run(["cp", "-r", str(staged), str(carried)], check=True)
    (site.home / "tiny.yaml").write_text(RUN)
    owner = site.home.stat()
    for path in (site.home / "tiny.yaml", carried, *carried.rglob("*")):
        os.chown(path, owner.st_uid, owner.st_gid)
    return carried


@pytest.fixture(scope="session")
def bundle(site: Site, staged: Path) -> Path:
    """Staged on the laptop, then carried to the user's home on the cluster."""
    return carry(staged, site)


def submit(site: Site, name: str) -> tuple[int, Path]:
    """One rank per node: with two processors, twice as many ranks take twice as long to start."""
    output = site.home / "output" / name
    less = ("--set", "slurm.tasks_per_node=1", "--set", "batch.micro=4")
    said = site.run(
        *RUNNER, "submit", "tiny.yaml", "--bundle", "bundle", "--output", str(output), *less
    )
    return site.job_number(said.stdout), output


def log(run_folder: Path) -> str:
    return "\n".join(path.read_text() for path in sorted((run_folder / "logs").glob("slurm-*.out")))


@pytest.fixture(scope="session")
def undisturbed(site: Site, bundle: Path) -> Path:
    """A run that nothing interrupts."""
    job, run_folder = submit(site, "undisturbed")
    ended = site.wait_for_end(job)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "0"), log(run_folder)
    assert ended["UserId"].startswith(f"{USER}(")
    return run_folder


@pytest.fixture(autouse=True)
def nothing_leaves(site: Site) -> Iterator[None]:
    """Every test here also shows that no packet tried to leave."""
    yield
    assert site.leaks() == ""
