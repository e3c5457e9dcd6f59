"""A run unpacks its environment on each node's own disk before the ranks start from there.

The environment is a small one: its python calls the interpreter of the tests, and prints that. The
rest is under test: the run file, srun, node-local.sh, its lock, and the command of the ranks.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import shutil
import sys
import tarfile
from pathlib import Path

import pytest
import yaml

from stage.bundle.bundle import Bundle, finish_bundle
from stage.files import sha256_of_bytes
from stage.lock.model import LockedAsset, LockedEnvironment, LockedFile, Lockfile, Source
from tests.site.conftest import RUN, RUNNER, Site, log
from tests.site.test_train_on_slurm import losses
from tests.support.commands import run_file, write_project
from tests.support.node import TEMPLATES

pytestmark = pytest.mark.site
LISTED = "".join(
    f"x {'0' * 64} {path}\n" for path in ("activate", "bin/python", "bin/runner")
).encode()
TREE = sha256_of_bytes(LISTED)
OWN_DISK = "/dev/shm"  # the only disk of its own that a node of the site has
ENVIRONMENT = """\
environment: {asset: train-env, node_local: true}
slurm:
  nodes: 2
  tasks_per_node: 1
  time: "00:10:00"
  setup: ["export OMP_NUM_THREADS=1 AIRLIFT_NODE_ROOT=/dev/shm"]
"""
BOOTSTRAP = """\
set -e
mkdir "$1.part.$$"
tar -xzf "${0%/*}/image.tar.gz" -C "$1.part.$$"
mv "$1.part.$$" "$1"
"""
PYTHON = f"""\
#!/bin/sh
echo "rank $SLURM_PROCID of $(uname -n) runs $0, conda prefix $CONDA_PREFIX"
exec {sys.executable} "$@"
"""
ACTIVATE = f"""\
CONDA_PREFIX={OWN_DISK}/airlift-$(id -u)/{TREE[:16]}
PATH=$CONDA_PREFIX/bin:$PATH
export CONDA_PREFIX PATH
"""


def environment_files() -> dict[str, bytes]:
    """The folder of the asset, as `stage fetch` lays it out."""
    image = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=image, mode="wb", mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w") as tar,
    ):
        members = {
            "bin/python": PYTHON.encode(),
            "activate": ACTIVATE.encode(),
            "bin/runner": Path(*RUNNER).read_bytes(),
            ".airlift/tree.txt": LISTED,
            ".airlift/env.json": (json.dumps({"tree": TREE}) + "\n").encode(),
        }
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(content), 0o755
            tar.addfile(member, io.BytesIO(content))
    facts = {"files": 3, "format": 1, "modules": 0, "size": 16384, "tree": TREE}
    return {
        "bootstrap.sh": BOOTSTRAP.encode(),
        "env.json": (json.dumps(facts, indent=1, sort_keys=True) + "\n").encode(),
        "image.tar.gz": image.getvalue(),
        "node-local.sh": (TEMPLATES / "node-local.sh").read_bytes(),
    }


def with_environment(bundle: Path, folder: Path) -> str:
    """A copy of a bundle, with an environment in it; its id."""
    files = {
        f"data/envs/train-env/{name}": content for name, content in environment_files().items()
    }
    shutil.copytree(bundle, folder)
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    locked = tuple(
        LockedFile(path, len(data), sha256_of_bytes(data), None, path)
        for path, data in files.items()
    )
    environment = LockedEnvironment("linux-64", {}, (), TREE)
    made = LockedAsset(
        "train-env",
        "environment",
        {"path": "x"},
        Source("path", "x"),
        locked,
        environment=environment,
    )
    lock = Bundle.open(bundle).lock
    assets = dict(sorted({**lock.assets, "train-env": made}.items()))
    return finish_bundle(folder, Lockfile(lock.name, assets), b"format: 1\n", ()).id


@pytest.fixture(scope="module")
def asset(site: Site, bundle: Path) -> Path:
    """The bundle of the training test, with an environment in it."""
    folder = site.home / "with-environment"
    with_environment(bundle, folder)
    run = "".join(line for line in RUN.splitlines(keepends=True) if not line.startswith("slurm:"))
    (site.home / "node-local.yaml").write_text(run.replace("steps: 40", "steps: 4") + ENVIRONMENT)
    owner = site.home.stat()
    for path in (site.home / "node-local.yaml", folder, *folder.rglob("*")):
        os.chown(path, owner.st_uid, owner.st_gid)
    return folder / "data" / "envs" / "train-env"


def test_every_node_unpacks_once_and_its_ranks_run_from_its_own_disk(
    site: Site, asset: Path
) -> None:
    output = site.home / "output" / "node-local"
    options = ("--bundle", "with-environment", "--output", str(output))
    said = site.run(*RUNNER, "submit", "node-local.yaml", *options)
    ended = site.wait_for_end(site.job_number(said.stdout))
    text = log(output)
    assert ended["JobState"] == "COMPLETED", text
    prefix = f"{OWN_DISK}/airlift-{site.home.stat().st_uid}/{TREE[:16]}"
    for node in ("n1", "n2"):
        assert text.count(f"node-local: {node}: unpacked 5 files to {prefix} in") == 1
    for rank, node in enumerate(("n1", "n2")):
        assert f"rank {rank} of {node} runs {prefix}/bin/python, conda prefix {prefix}\n" in text
    assert [step for step, _ in losses(output)] == [1, 2, 3, 4]

    later = site.run(
        "srun", "--nodes=2", "--ntasks-per-node=1", "sh", str(asset / "node-local.sh"), OWN_DISK
    )
    assert later.stdout.split() == [prefix, prefix]
    assert later.stderr.count(f"reusing {prefix}, 3 files") == 2


def test_the_python_of_a_command_is_the_one_on_the_nodes_own_disk(site: Site, asset: Path) -> None:
    """Both the task of the launcher and `python` of the command, on each node."""
    project = write_project(site.home / "own")
    keys = yaml.safe_load(ENVIRONMENT)
    keys["slurm"]["options"] = {"cpus-per-task": 1, "mem": "500M"}
    run_file(project, "own", "python train.py", launch="rank", **keys)
    owner = site.home.stat()
    for path in (project, *project.rglob("*")):
        os.chown(path, owner.st_uid, owner.st_gid)
    bundle, output = asset.parents[2], site.home / "output" / "own"
    options = ("--bundle", str(bundle), "--output", str(output))
    said = site.run(*RUNNER, "submit", str(project / "own.yaml"), *options)
    ended = site.wait_for_end(site.job_number(said.stdout))
    text = log(output)
    assert ended["JobState"] == "COMPLETED", text
    prefix = f"{OWN_DISK}/airlift-{owner.st_uid}/{TREE[:16]}"
    for rank, node in enumerate(("n1", "n2")):
        assert text.count(f"rank {rank} of {node} runs {prefix}/bin/python") == 2, text
        assert f"rank {rank} step 3 loss 0.25" in text
