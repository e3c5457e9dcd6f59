"""Runs on a site's own torch, three modules on PYTHONPATH: they train, and notice another torch."""

from __future__ import annotations

import json
import os
import subprocess
from importlib.metadata import version as version_of
from pathlib import Path

import pytest

from tests.runner.conftest import Cluster, metrics
from tests.support.environment import site

OWN = {"transformers", "safetensors", "pyarrow", "accelerate", "tensorboard", "click", "PyYAML"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> str:
    """PYTHONPATH after `module load`."""
    return site.modules(tmp_path_factory.mktemp("modules"))


@pytest.fixture
def prefix(folders: str, tmp_path: Path) -> Path:
    return site.environment_on(folders, tmp_path / "prefix", OWN)


def run(cluster: Cluster, prefix: Path, *words: str, **more: str) -> tuple[int, str]:
    """`runner` of the environment, as after `activate`; its exit code and what it prints."""
    environ = cluster.environment(**more, PATH=f"{prefix}/bin:{os.environ['PATH']}")
    bundle = () if words[0] == "rank" else ("--bundle", cluster.bundle)
    done = subprocess.run(
        [prefix / "bin/python", prefix / "bin/runner", *words, *bundle],
        cwd=cluster.folder, env=environ, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def load_another(prefix: Path, folder: Path) -> str:
    """A module with another torch takes the place of the one that was there; its PYTHONPATH."""
    other = site.only_metadata(folder / "other", "torch", "9.9")
    named = prefix / next(prefix.glob("lib/python3*/site-packages/zz-airlift-site.pth"))
    kept = [line for line in named.read_text().splitlines() if not line.endswith("/torch")]
    named.write_text("\n".join([str(other), *kept]) + "\n")
    return str(other)


def test_two_ranks_train_on_the_sites_torch_and_a_changed_one_is_refused(
    cluster: Cluster, prefix: Path, folders: str, tmp_path: Path
) -> None:
    cluster.write(steps=2, engine={"name": "ddp"})
    torch = folders.split(":")[1]
    code, said = run(cluster, prefix, "check", "tiny.yaml", PYTHONPATH=folders)
    assert code == 0, said
    assert f"torch {version_of('torch')} is the site's, in {torch}; not of {prefix}" in said
    train = ("train", "tiny.yaml", "--processes", "2")
    code, said = run(cluster, prefix, *train, PYTHONPATH=folders)
    assert code == 0 and "PYTHONPATH" not in said, said
    assert [step for step, _ in metrics(cluster.output())] == [1, 2]
    record = json.loads((cluster.output() / "environment.json").read_text())
    assert record["environment_tree"] == "0" * 64
    assert record["site"]["torch"] == record["versions"]["torch"] == version_of("torch")

    loaded = str(site.only_metadata(tmp_path / "loaded", "torch", "8.8"))
    code, said = run(cluster, prefix, "check", "tiny.yaml", PYTHONPATH=loaded)
    assert code == 0, said  # neither check nor train imports from it
    assert f"not imported from: {loaded}" in said

    other = Path(load_another(prefix, tmp_path))
    rank = ("rank", str(cluster.output()), "train")
    for words in (("check", "tiny.yaml"), train, ("prepare", "tiny.yaml"), rank):
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        is_one = dict(zip(names, ("0", "1", "0", "127.0.0.1", "29400"), strict=True))
        more = is_one if words is rank else {}
        code, said = run(cluster, prefix, *words, **more)
        assert code == 2 and "Traceback" not in said, said
        assert f"{prefix} was made on torch {version_of('torch')}; its python now finds 9.9" in said
        assert "Load the module that it was made on. For the torch that is there now: " in said

    other.rename(tmp_path / "gone")
    code, said = run(cluster, prefix, "check", "tiny.yaml")
    assert code == 2 and "its python now finds none." in said
    assert said.count("->") == 1, said  # not how to install a torch
