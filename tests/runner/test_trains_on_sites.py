"""One image on a site's own torch, made and used at each kind of site by somebody without network.

The image is real: this run's transformers, with fewer models, and all that it requires. At each
site: `bootstrap.sh`, `runner check`, and `runner train` of two ranks.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import version as version_of
from pathlib import Path

import pytest

from runner.config.run_config import RunConfig
from scripts.lib.demo.repositories import dataset_files
from scripts.lib.hub.loopback_hub import LoopbackHub
from stage.environment.image.own_wheel import own_requirements
from tests.runner.conftest import Cluster, metrics
from tests.support.environment import site
from tests.support.environment.laptop import PROFILE, wheel_of_installed
from tests.support.staging import fetch_bundle
from tests.support.training.models import tiny_model_files

pytestmark = pytest.mark.slow

PACKAGES = ("transformers", "safetensors", "pyarrow", "accelerate", "tensorboard", "psutil")
PROVIDED = ("torch", "numpy")
LEFT_OUT = r"transformers/models/(?!__init__|auto/|bert/|encoder_decoder/)|pyarrow/(include|tests)/"
MANIFEST = """\
format: 1
name: job
assets:
  tiny-bert: {model: acme/tiny-bert}
  reference: {dataset: acme/reference, config: chapters}
  train-env: {environment: environment.yml, profile: node.yml}
"""


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with site.open_folder() as folder:
        yield folder


@pytest.fixture(scope="module")
def bundle(folder: Path) -> Path:
    """A model, data, and an environment for this run's torch and numpy."""
    laptop = folder / "laptop"
    laptop.mkdir()
    required = [requirement.partition(">")[0] for requirement in own_requirements()]
    for name in site.with_requirements(*PACKAGES, *required, without=PROVIDED):
        wheel_of_installed(name, laptop / "wheels", without=LEFT_OUT)
    listed = "".join(f"    - {name}\n" for name in PACKAGES)
    (laptop / "environment.yml").write_text(
        f"dependencies:\n  - pip:\n    - --no-index\n    - --find-links wheels\n{listed}"
    )
    python = ".".join(map(str, sys.version_info[:3]))
    provides = {"python": python, **{name: version_of(name) for name in PROVIDED}}
    lines = "".join(f'  {name}: "{version}"\n' for name, version in provides.items())
    glibc = (os.confstr("CS_GNU_LIBC_VERSION") or "").removeprefix("glibc ")
    profile = PROFILE.replace('"2.28"', f'"{glibc}"')
    (laptop / "node.yml").write_text(f"{profile}provides:\n{lines}")
    (laptop / "job.yaml").write_text(MANIFEST)
    with LoopbackHub(laptop / "hub") as hub:
        model = tiny_model_files(laptop / "model", "bert")
        hub.repositories.commit("models", "acme/tiny-bert", model)
        hub.repositories.commit("datasets", "acme/reference", dataset_files())
        return fetch_bundle(laptop, "job", hub.endpoint)


@dataclass
class Login:
    """A login of another user at a site.

    Attributes:
        home: a folder of that user.
        inside: the words that start the site's container; none: there is none.
        variables: after `module load`, or of the container.
    """

    home: Path
    bundle: Path
    variables: dict[str, str]
    inside: list[str] = field(default_factory=list)

    @property
    def prefix(self) -> Path:
        return self.home / "envs/train"

    def run(self, *words: str | Path) -> subprocess.CompletedProcess[str]:
        environ = {"HOME": str(self.home), "USER": "nobody", "OMP_NUM_THREADS": "1"}
        # Charliecloud binds TMPDIR in place of /tmp.
        environ |= {} if self.inside else {"TMPDIR": str(self.home / "tmp")}
        environ |= self.variables
        command = [*site.as_nobody(*self.inside), "/bin/sh", "-c", 'cd "$HOME" && exec "$@"', "sh"]
        return subprocess.run(
            [*command, *map(str, words)], env=environ, capture_output=True, text=True, timeout=300
        )

    def runner(self, *words: str | Path) -> str:
        """What `runner` of the environment says, which must be content."""
        words = (*words, "--bundle", self.bundle)
        if self.inside:
            done = self.run(self.prefix / "bin/python", self.prefix / "bin/runner", *words)
        else:
            said = shlex.join(map(str, words))
            done = self.run("/bin/sh", "-c", f". {self.prefix}/activate && exec runner {said}")
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr


def login(kind: str, folder: Path, bundle: Path) -> Login:
    """A site of a kind, and its user."""
    home = folder / kind
    here = home / "site"
    (home / "tmp").mkdir(parents=True)
    python, torch = home / "bin", ""
    variables, inside = dict[str, str](), list[str]()
    if kind == "modules":
        variables["PYTHONPATH"] = site.modules(here)
        variables["LOADEDMODULES"] = "gcc/13:pytorch/2.13"
        site.path_with(python, site.BASE)
    elif kind == "venv-of-a-venv":
        python = site.venv_of_a_venv(here).parent
    elif kind == "library":
        variables["PYTHONPATH"] = site.modules(here / "modules")
        program, variables["LD_LIBRARY_PATH"] = site.python_with_a_library(here / "python")
        python = program.parent
    elif kind == "wrapper":
        old, torch, numpy = site.modules(here).split(":")
        seen = home / "seen"
        site.wrapper(python, keeps_name=True, shows=Path(torch), at=seen, python=site.BASE)
        variables["PYTHONPATH"] = f"{old}:{seen}:{numpy}"
    else:
        shown, python = site.venv_with_torch(here), site.INSIDE / "bin"
        if kind == "bubblewrap":
            inside = site.bubblewrap(shown, site.INSIDE, home)
        else:
            inside = site.charliecloud(folder / "image", shown)
    if os.geteuid() == 0:
        for path in (home, home / "tmp"):
            os.chown(path, site.NOBODY, site.NOBODY)
    return Login(home, bundle, {"PATH": f"{python}:/usr/bin:/bin", **variables}, inside)


@pytest.fixture(scope="module")
def first() -> dict[str, object]:
    """The losses and the tree digests at the first site, which are the same at all."""
    return {}


KINDS = ("modules", "venv-of-a-venv", "library", "wrapper", "bubblewrap", "charliecloud")


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_train_on_the_sites_torch(
    kind: str, folder: Path, bundle: Path, first: dict[str, object]
) -> None:
    site.skip_without(kind)
    user = login(kind, folder, bundle)
    done = user.run("sh", bundle / "data/envs/train-env/bootstrap.sh", user.prefix)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (user.prefix / "bin").stat().st_uid == (os.geteuid() or site.NOBODY)

    cluster = Cluster(user.home, bundle)
    cluster.write(steps=2, engine={"name": "ddp"})
    said = user.runner("check", "tiny.yaml", "--processes", "2")
    assert f"torch {version_of('torch')} is the site's, in " in said
    assert "nothing found that would fail" in said
    user.runner("train", "tiny.yaml", "--processes", "2")
    losses = metrics(cluster.output())
    tree = (user.prefix / ".airlift/tree.txt").read_bytes()
    assert [step for step, _ in losses] == [1, 2]
    assert first.setdefault("site", (losses, tree)) == (losses, tree)

    if kind == "modules":
        user.runner("init", "masked-lm", "-o", "mine.yaml")
        assert RunConfig.load(user.home / "mine.yaml").slurm.modules == ("gcc/13", "pytorch/2.13")
        site.program(user.home / "rank.py", "import sys; print('rank of', sys.executable)\n")
        again = f"export PYTHONPATH={user.variables['PYTHONPATH']}"  # `module load`
        words = "accelerate launch --cpu --num_processes 1 --num_machines 1 --mixed_precision no"
        script = f". {user.prefix}/activate && {again} && {words} --dynamo_backend no rank.py"
        done = user.run("/bin/sh", "-c", script)
        assert f"rank of {user.prefix}/bin/python3" in done.stdout, done.stderr
    if user.inside:  # and outside of its container there is no torch
        user.inside = []
        done = user.run(user.prefix / "bin/python", "-c", "import torch")
        assert "No module named 'torch'" in done.stderr
