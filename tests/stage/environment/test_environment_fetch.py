"""An environment travels: fetched into a bundle, created on a cluster, and used there."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from stage.files import sha256_of_bytes
from tests.support.environment.laptop import EnvironmentLaptop, bootstrap, run, tree_of


@pytest.fixture(scope="module")
def created(
    environment_laptop: EnvironmentLaptop, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The environment, created from the image by `bootstrap.sh`. Treat it as read-only."""
    prefix = tmp_path_factory.mktemp("cluster") / "env"
    done = bootstrap(environment_laptop.asset, prefix)
    assert done.returncode == 0, done.stderr
    return prefix


def test_the_bundle_is_sound_and_says_what_is_in_it(environment_laptop: EnvironmentLaptop) -> None:
    assert environment_laptop.stage("verify", "bundle").returncode == 0
    shown = environment_laptop.stage("show", "bundle").stdout
    assert "linux-64 (solved for archspec 1 x86_64, glibc 2.28" in shown
    lock = json.loads((environment_laptop.bundle / "stage.lock").read_text())
    environment = lock["assets"]["small-env"]["environment"]
    assert (
        environment["tree"]
        == json.loads((environment_laptop.asset / "env.json").read_text())["tree"]
    )
    sources = {i["origin"]: i for i in lock["assets"]["small-env"]["made_from"]}
    assert {package["url"] for package in environment["packages"]} == sources.keys()
    for url, source in sources.items():
        content = Path(unquote(urlsplit(url).path)).read_bytes()
        assert (source["sha256"], source["size"]) == (sha256_of_bytes(content), len(content))


def test_everything_in_the_environment_runs_with_an_empty_environment(created: Path) -> None:
    assert run(created, "python", "-c", "import sys; print(sys.prefix)") == str(created)
    assert run(created, "greet") == "hello from the environment 1.1"
    assert run(created, "mpirun") == f"orterun of {created}/bin/orterun"
    assert run(created, "stage", "--version").startswith("stage, version")
    assert "made" in run(created, "python", "-c", "import made; print(made)")


def test_nothing_is_left_that_says_the_placeholder(created: Path) -> None:
    for path in created.rglob("*"):
        if path.is_file() and ".airlift" not in path.parts and "stage/environment" not in str(path):
            assert b"airlift-environment-prefix" not in path.read_bytes(), path


def test_a_post_link_script_is_never_run(created: Path) -> None:
    assert (created / "bin/.scripted-post-link.sh").exists()
    assert not list(created.rglob("post-link-ran"))


def test_links_arrive_as_links(created: Path) -> None:
    assert (created / "share/links/to-folder/inside.txt").read_text() == "inside\n"
    assert (created / "share/links/across").resolve() == (created / "etc/links.conf").resolve()
    assert str((created / "share/links/dangling").readlink()) == "not-there"


def test_a_shell_killed_while_its_tar_runs_another_shell_makes_the_same_tree_and_leaves_nothing(
    environment_laptop: EnvironmentLaptop, created: Path, tmp_path: Path
) -> None:
    prefix = tmp_path / ("long" * 20)
    killed = start_bootstrap(environment_laptop.asset, prefix)
    os.killpg(
        killed.pid, signal.SIGSTOP
    )  # so that there is much left to write when the next run comes
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    assert {"tar", "gzip"} <= set(group_of(killed))
    os.killpg(killed.pid, signal.SIGCONT)
    done = bootstrap(environment_laptop.asset, prefix, shell="bash")
    assert done.returncode == 0, done.stderr
    assert f"removing what an interrupted run left: {prefix}.part.{killed.pid}\n" in done.stdout
    assert (list(tmp_path.iterdir()), group_of(killed)) == ([prefix], [])
    assert tree_of(prefix) == tree_of(created)
    assert run(prefix, "greet") == "hello from the environment 1.1"


@pytest.mark.parametrize("shell", ["dash", "bash"])
def test_what_somebody_else_is_at_work_on_is_left_alone(
    environment_laptop: EnvironmentLaptop, shell: str
) -> None:
    """In a folder of a group: their processes are there, and cannot be signalled."""
    user = 20_000 if os.geteuid() == 0 else None
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copy(environment_laptop.asset / "bootstrap.sh", folder)
        (folder / "env").mkdir()
        for process in (1, 999_999_999):
            (folder / f"env.part.{process}/.airlift").mkdir(parents=True)
            (folder / f"env.part.{process}/.airlift/owner").write_text(f"{os.uname().nodename}\n")
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o777)
        command = (shell, folder / "bootstrap.sh", folder / "env")
        done = subprocess.run(
            command, user=user, cwd="/", capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 2, done.stderr
        assert f"left alone: {folder}/env.part.1, of another run" in done.stdout + done.stderr
        assert sorted(path.name for path in folder.glob("env.part.*")) == ["env.part.1"]


def group_of(leader: subprocess.Popen[bytes]) -> list[str]:
    """The names of the processes of a process group that have not ended."""
    shown = subprocess.run(
        ["ps", "-eo", "pgid=,stat=,comm="], capture_output=True, text=True, check=True
    ).stdout
    found = [line.split(None, 2) for line in shown.splitlines()]
    return [
        name
        for group, state, name in found
        if int(group) == leader.pid and not state.startswith("Z")
    ]


def start_bootstrap(asset: Path, prefix: Path) -> subprocess.Popen[bytes]:
    """Starts `bootstrap.sh` and returns once it unpacks."""
    command = ("/bin/sh", asset / "bootstrap.sh", prefix)
    running = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
    while not list(prefix.parent.glob("*.part.*/lib/python*")):
        assert running.poll() is None
        time.sleep(0.01)
    return running


def test_stage_env_create_makes_the_same_tree(
    environment_laptop: EnvironmentLaptop, created: Path, tmp_path: Path
) -> None:
    prefix = tmp_path / "envs" / "env"  # as ~/envs in a new account, the folder is not there
    done = environment_laptop.stage("env", "create", "bundle", "small-env", prefix)
    assert done.returncode == 0, done.stderr
    assert f"use it: . '{prefix}/activate'" in done.stdout
    assert tree_of(prefix) == tree_of(created)
    assert [path.name for path in tmp_path.glob("*/*")] == ["env"]


def test_an_environment_imports_nothing_that_pip_install_user_or_a_module_left(
    created: Path, tmp_path: Path
) -> None:
    """By `activate`, and by a script of it that is started without."""
    home, stale = tmp_path / "home", tmp_path / "stale"
    ask = (created / "bin/python", "-c", "import site; print(site.getusersitepackages())")
    user = Path(subprocess.check_output(ask, env={"HOME": str(home)}, text=True).strip())
    for folder in (user, stale):
        folder.mkdir(parents=True)
        (folder / "click.py").write_text("print('a liar')\n")
    settings = {"HOME": str(home), "PATH": "/usr/bin:/bin"}
    look = "python -c 'import click; print(click.__file__)'"
    after = "airlift_deactivate && echo $PYTHONPATH${PYTHONNOUSERSITE-}"
    for shell in ("dash", "bash"):
        done = subprocess.run(
            [shell, "-euc", f". '{created}/activate' && {look} && {after}"],
            env={**settings, "PYTHONPATH": str(stale)},
            capture_output=True,
            text=True,
        )
        click, restored = done.stdout.splitlines()
        assert click.startswith(f"{created}/lib/") and restored == str(stale), (
            done.stdout + done.stderr
        )
        assert (
            done.stderr.count(
                f"PYTHONPATH is unset here: this environment has its own packages. It was: {stale}"
            )
            == 1
        )
    starts = {
        path.name: path.read_bytes()[:400] for path in (created / "bin").iterdir() if path.is_file()
    }
    interpreter = f"{created}/bin/python".encode()
    ours = {
        name: text
        for name, text in starts.items()
        if text.startswith(b"#!") and interpreter in text
    }
    assert {"pip", "greet"} <= set(ours)
    for name, text in ours.items():
        first = text.partition(interpreter)[2].partition(b"\n")[0]
        assert b" -s" in first, f"{name} would import what lies in ~/.local: {first!r}"
