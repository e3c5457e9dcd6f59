"""An environment travels: fetched into a bundle, created on a cluster by every route, and refused when it is not whole."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.environments import CONDA, EnvironmentLaptop, new_laptop, stand_ins, tools, wheel_of_installed


@pytest.fixture(scope="module")
def laptop(conda_channel: Path, tmp_path_factory: pytest.TempPathFactory) -> EnvironmentLaptop:
    """A laptop that fetched the small environment. Treat its bundle as read-only."""
    folder = tmp_path_factory.mktemp("environments")
    channel = folder / "conda-channel"
    shutil.copytree(conda_channel, channel)
    laptop = new_laptop(folder / "laptop", channel, tools(folder / "tools"))
    laptop.lock([*CONDA, *stand_ins(channel)], [wheel_of_installed("click", folder / "wheels")])
    done = laptop.stage("fetch", "small.yaml", "-o", "bundle")
    assert done.returncode == 0, done.stderr
    return laptop


@pytest.fixture(scope="module")
def created(laptop: EnvironmentLaptop, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The environment, created from the image by `bootstrap.sh`. Treat it as read-only."""
    prefix = tmp_path_factory.mktemp("cluster") / "env"
    done = bootstrap(laptop.asset, prefix)
    assert done.returncode == 0, done.stderr
    return prefix


def bootstrap(asset: Path, prefix: Path | str, *, shell: str = "sh", **settings: str) -> subprocess.CompletedProcess[str]:
    """`sh bootstrap.sh PREFIX` with nothing in the environment, on a machine without network."""
    command = ["/usr/bin/unshare", "-n", *f"/usr/bin/{shell}".split(), str(asset / "bootstrap.sh"), str(prefix)]
    return subprocess.run(command, env=settings, capture_output=True, text=True, cwd=asset.parents[3])


def run(prefix: Path, program: str, *arguments: str) -> str:
    """What a program of the environment prints, started with an empty environment."""
    done = subprocess.run([prefix / "bin" / program, *arguments], env={}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def tree_of(prefix: Path) -> str:
    return hashlib.sha256((prefix / ".airlift/tree.txt").read_bytes()).hexdigest()


def test_the_bundle_is_sound_and_says_what_is_in_it(laptop: EnvironmentLaptop) -> None:
    assert laptop.stage("verify", "bundle").returncode == 0
    shown = laptop.stage("show", "bundle").stdout
    assert "linux-64 (solved for archspec 1 x86_64, glibc 2.28" in shown
    lock = json.loads((laptop.bundle / "stage.lock").read_text())
    environment = lock["assets"]["small-env"]["environment"]
    assert environment["tree"] == json.loads((laptop.asset / "env.json").read_text())["tree"]
    files = {file["path"]: file for file in lock["assets"]["small-env"]["files"]}
    for package in environment["packages"]:
        assert files[f"data/envs/small-env/{package['path']}"]["origin"].startswith("file://")


def test_everything_in_the_environment_runs_with_an_empty_environment(created: Path) -> None:
    assert run(created, "python", "-c", "import sys; print(sys.prefix)") == str(created)
    assert run(created, "greet") == "hello from the environment 1.1"
    assert run(created, "mpirun") == f"orterun of {created}/bin/orterun"
    assert run(created, "stage", "--version").startswith("stage, version")


def test_nothing_is_left_that_says_the_placeholder(created: Path) -> None:
    for path in created.rglob("*"):
        if path.is_file() and ".airlift" not in path.parts and "stage/environment" not in str(path):
            assert b"airlift-environment-prefix" not in path.read_bytes(), path


def test_binaries_keep_their_length_and_text_gets_the_prefix(created: Path) -> None:
    library = (created / "lib/libmpi.so.40").read_bytes()
    prefix = str(created).encode()
    assert prefix + b"\0" in library
    assert prefix + b"/etc:" + prefix + b"/share\0" in library
    assert library.endswith(b"\0tail\0")
    assert (created / "etc/openmpi-mca-params.conf").read_text() == f"prefix = {created}\n"


def test_a_post_link_script_is_never_run(created: Path) -> None:
    assert (created / "bin/.scripted-post-link.sh").exists()
    assert not list(created.rglob("post-link-ran"))


def test_links_arrive_as_links(created: Path) -> None:
    assert (created / "share/links/to-folder/inside.txt").read_text() == "inside\n"
    assert (created / "share/links/across").resolve() == (created / "etc/links.conf").resolve()
    assert os.readlink(created / "share/links/dangling") == "not-there"


def test_pip_and_its_records_agree_with_the_files(created: Path) -> None:
    assert run(created, "python", "-m", "pip", "list", "--format", "freeze")
    code = (
        "import base64, hashlib, importlib.metadata as m\n"
        "for d in m.distributions():\n"
        "    for f in d.files or []:\n"
        "        assert f.locate().exists(), f\n"
        "        if f.hash: assert f.hash.value == base64.urlsafe_b64encode(\n"
        "            hashlib.sha256(f.read_binary()).digest()).rstrip(b'=').decode(), f\n"
        "print('agreed')"
    )
    assert run(created, "python", "-c", code) == "agreed"


@pytest.mark.parametrize("shell", ["dash", "bash"])
def test_another_shell_and_a_longer_prefix_give_the_same_tree(
    laptop: EnvironmentLaptop, created: Path, tmp_path: Path, shell: str
) -> None:
    prefix = tmp_path / f"{shell}-{'long' * 20}"
    done = bootstrap(laptop.asset, prefix, shell=shell)
    assert done.returncode == 0, done.stderr
    assert tree_of(prefix) == tree_of(created)
    assert run(prefix, "greet") == "hello from the environment 1.1"


def test_the_packages_route_gives_the_same_tree(laptop: EnvironmentLaptop, created: Path, tmp_path: Path) -> None:
    done = laptop.stage("env", "create", "bundle", "small-env", tmp_path / "env", "--route", "packages")
    assert done.returncode == 0, done.stderr
    assert tree_of(tmp_path / "env") == tree_of(created)
    assert [path.name for path in tmp_path.iterdir()] == ["env"]
    assert run(tmp_path / "env", "greet") == "hello from the environment 1.1"


def test_activate_sets_the_path_and_takes_it_back(created: Path) -> None:
    for shell in ("dash", "bash"):
        script = (
            f". '{created}/activate'; command -v greet; echo $CONDA_PREFIX; airlift_deactivate; "
            "echo $PATH; echo ${CONDA_PREFIX-none}"
        )
        done = subprocess.run(["/usr/bin/" + shell, "-euc", script], env={"PATH": "/bin"}, capture_output=True, text=True)
        assert done.stdout.splitlines() == [f"{created}/bin/greet", str(created), "/bin", "none"], done.stderr
