"""`stage env probe --to`, with a real sshd: what it prints, writes, keeps and collects.

There is no Slurm on these login nodes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stage.carry.clusters import find_cluster
from stage.carry.probe import _WHY, _WRITTEN, _name_of, profile_text, room_script, rooms_of
from stage.carry.ssh import PushTarget, RemoteShell
from stage.environment.spec.profile import Profile
from tests.remedies.obeyed import in_it, obeys
from tests.support.servers.sshd import Sshd, link_programs

PROBE = "stage/carry/probe.py"
TOOLS = (
    "sh bash ls cut mkdir rm mv find tail cat sleep true id uname dirname df sed awk tr grep sort "
    "env timeout getconf rmdir rsync tar gzip sha256sum setsid nice python3"
)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Sshd]:
    """A login node with a home and a scratch disk of its own."""
    programs = link_programs(tmp_path / "bin", TOOLS)
    for name in ("home", "scratch", "laptop"):
        (tmp_path / name).mkdir()
    (tmp_path / "home/.bash_profile").write_text(
        f"export SCRATCH={tmp_path}/scratch PATH={programs}\necho Welcome\n"
        "module() { test \"$1 $2\" = 'load torch' && export LOADEDMODULES=torch/2.7; }\n"
    )
    (tmp_path / "home/.bashrc").write_text("echo Greetings\n")
    server = Sshd(tmp_path / "d", programs, HOME=tmp_path / "home")
    yield server
    server.close()


def probe(server: Sshd, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """As a person does on their laptop."""
    environment = os.environ | {
        "PATH": f"{server.laptop}:{os.environ['PATH']}",
        "XDG_CONFIG_HOME": str(folder / "config"),
        "PYTHONPATH": str(Path(__file__).parents[3]),
    }
    return subprocess.run(
        [sys.executable, "-m", "stage", "env", "probe", *arguments],
        cwd=folder / "laptop",
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


@obeys("stage/cli/env.py", "stage env probe --to CLUSTER --logout")
def test_a_cluster_is_asked_and_noted_and_what_is_there_is_kept(
    server: Sshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    done = probe(server, tmp_path, "--to", "cluster")
    assert done.returncode == 0, done.stderr
    assert "which greets: 'Greetings'" in done.stdout and "no Slurm" in done.stdout
    assert f"{tmp_path}/home   (home: " in done.stdout
    assert not list((tmp_path / "home").glob(".airlift*"))
    profile = tmp_path / "laptop/envs/profiles/cluster.yml"
    glibc = os.confstr("CS_GNU_LIBC_VERSION")
    assert f"glibc {Profile.load(profile).glibc}" == glibc
    assert "assumed" not in profile.read_text()
    next_ = in_it(done.stdout, r"(?<=stage env probe )--to cluster:FOLDER/airlift")
    folder = tmp_path / "scratch"
    done = probe(server, tmp_path, *next_.replace("FOLDER", str(folder)).split())
    assert "--profile envs/profiles/cluster.yml -o manifests/my.yaml" in done.stdout, done.stderr
    found = find_cluster("cluster", None)
    assert found.target == PushTarget("cluster", f"{folder}/airlift")
    assert found.profile == profile and server.logins == 1
    with open(profile, "a") as file:
        file.write("# my own\n")
    listed = tmp_path / "config/airlift/clusters.yaml"
    listed.write_text(listed.read_text() + "  modules: [torch]\n")
    done = probe(server, tmp_path, "--to", "cluster")
    assert "yours, kept" in done.stdout, done.stdout
    assert profile.read_text().endswith("# my own\n")
    assert 'modules: ["torch/2.7"]' in profile.with_name("cluster.new.yml").read_text()
    assert listed.read_text().endswith("modules: [torch]\n")
    assert probe(server, tmp_path, "--to", "cluster", "--logout").stdout == "cluster: logged out\n"
    assert "no login" in probe(server, tmp_path, "--to", "cluster", "--logout").stdout
    assert probe(server, tmp_path, "--to", "./here").returncode == 2
    error = probe(server, tmp_path, "--logout").stderr
    again = in_it(error, r"(?<=stage env probe )--to CLUSTER --logout").replace(
        "CLUSTER", "cluster"
    )
    assert "no login" in probe(server, tmp_path, *again.split()).stdout


@obeys(PROBE, "Look: stage env probe --script | {}sh -s")
def test_modules_that_do_not_load_are_named(server: Sshd, tmp_path: Path) -> None:
    (tmp_path / "laptop/clusters.yaml").write_text("c: {host: cluster, setup: exit 3}\n")
    done = probe(server, tmp_path, "--to", "c")
    assert done.returncode == 5 and "`setup` failed" in done.stderr, done.stderr
    look = in_it(done.stderr, r"(?<=Look: )stage env probe .*").replace(
        "ssh", f"{server.laptop}/ssh"
    )
    run = f'stage() {{ {sys.executable} -m stage "$@"; }}; {look}'
    looked = subprocess.run(["bash", "-c", run], capture_output=True, text=True, timeout=60)
    assert "\nglibc: " in looked.stdout, looked


def test_the_room_at_a_folder_is_the_least_of_disk_and_quota(tmp_path: Path) -> None:
    here = RemoteShell(PushTarget(None, "."), ("sh", "-s"), "")
    (room,) = rooms_of(here.ask(room_script(str(tmp_path / "a b/c"))).text)
    assert room.folder == f"{tmp_path}/a b/c" and room.is_writable
    assert room.left is not None and abs(room.left - shutil.disk_usage(tmp_path).free) < 2**30
    lfs = tmp_path / "bin/lfs"
    lfs.parent.mkdir()
    lfs.write_text("#!/bin/sh\necho '  /a/very/long/path'\necho '  2048* 3072 4096 - 5 0 0 -'\n")
    lfs.chmod(0o755)
    there = RemoteShell(
        PushTarget(None, "."), ("env", f"PATH={lfs.parent}:{os.environ['PATH']}", "sh", "-s"), ""
    )
    (room,) = rooms_of(there.ask(room_script(str(tmp_path))).text)
    assert room.quota == room.left == 2 * 2**20


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (
            "# Profile of login1\nname: login1\nglibc: '2.28'\nlinux: '4.18'\n"
            "# This node has no GPU that answers.\n"
            "#   partition gpu gpu:v100:4 (compute capability 7.0)\n#   partition big gpu:4\n",
            "# Profile of login1\nname: gauss\nglibc: '2.28' WHY\nlinux: '4.18' WHY\n"
            'cuda: "12.2" WHY\ncompute_capability: "7.0" WHY\n# the node\'s answer: /x/f\n',
        ),
        (
            "name: login1\n#   partition gpu gpu:4\n",
            'name: gauss\ncuda: "12.2" WHY\ncompute_capability: "8.0" WHY\n'
            "# the node's answer: /x/f\n",
        ),
        (
            "glibc: '2.28'\ncuda: '11.8'\n#   partition gpu gpu:4\n",
            "glibc: '2.28' WHY\ncuda: '11.8'\n# the node's answer: /x/f\n",
        ),
        ("linux: '4.18'\n", "linux: '4.18' WHY\n# the node's answer: /x/f\n"),
    ],
)
def test_what_is_assumed_of_nodes_that_were_not_asked_is_marked(answer: str, expected: str) -> None:
    text = profile_text("gauss", answer, is_assumed=True, waits="/x/f").replace(_WHY, "WHY")
    assert text.replace("   WHY", " WHY").partition(_WRITTEN)[0] == expected


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("me@login1.gauss.example.org", "gauss"),
        ("l2.newton", "newton"),
        ("login-3", "login-3"),
        ("gauss", "gauss"),
        ("me@10.0.0.7", "10.0.0.7"),
        ("me@[::1]", "[::1]"),
    ],
)
def test_a_cluster_is_called_after_its_host(host: str, name: str) -> None:
    assert _name_of(host) == name
