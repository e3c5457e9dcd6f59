"""scripts/slurm-site itself: closed, and gone without a trace."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.site.conftest import REPOSITORY, USER, Site

pytestmark = pytest.mark.site


@pytest.fixture
def other() -> Iterator[Site]:
    """A second site, beside the one of the other tests."""
    with tempfile.TemporaryDirectory(prefix="slurm-site-", dir="/tmp") as folder:
        running = Site(Path(folder))
        running.control("up", "--nodes", "1", "--user", USER, "--with", str(os.getpid()))
        yield running
        running.control("down")


def test_what_tries_to_leave_is_dropped_and_written_down(site: Site, other: Site) -> None:
    assert (other.leaks(), other.control("leaks").returncode) == ("", 0)
    asked = other.run("getent", "hosts", "huggingface.co", check=False)
    assert asked.returncode == 2
    connect = "exec 3<>/dev/tcp/203.0.113.7/443"
    other.control("nexec", "n1", "timeout", "2", "bash", "-c", connect, check=False)
    leaks = other.leaks()
    assert "-> 192.0.2.53 udp 53 huggingface.co" in leaks
    assert "10.77.0.1 -> 203.0.113.7 tcp 443" in leaks
    assert other.control("leaks", check=False).returncode == 1
    assert site.leaks() == ""


def test_the_user_is_an_ordinary_one_and_known_inside_only(site: Site) -> None:
    assert site.run("id", "-un").stdout == f"{USER}\n"
    assert site.run("id", "-u").stdout != "0\n"
    assert site.run("touch", "/etc/by-alice", check=False).returncode != 0
    with pytest.raises(KeyError):
        pwd.getpwnam(USER)


def test_nodes_are_machines_of_their_own_with_a_shared_disk(site: Site) -> None:
    names = site.run("srun", "--nodes=2", "--ntasks=2", "--label", "hostname").stdout
    assert sorted(names.splitlines()) == ["0: n1", "1: n2"]
    site.run(
        "srun",
        "--nodes=1",
        "--nodelist=n1",
        "bash",
        "-c",
        "echo here > disk; echo there > /dev/shm/memory",
    )
    read = site.run(
        "srun",
        "--nodes=1",
        "--nodelist=n2",
        "bash",
        "-c",
        "cat disk; cat /dev/shm/memory",
        check=False,
    )
    assert read.stdout == "here\n"


def test_nothing_of_a_site_outlives_it(other: Site) -> None:
    before = set(Path("/sys/class/net").iterdir())
    other.control("down")
    assert not other.folder.exists()
    assert set(Path("/sys/class/net").iterdir()) == before
    assert not [
        path for path in Path("/proc").glob("[0-9]*/cmdline") if _mentions(path, str(other.folder))
    ]
    assert str(other.folder) not in Path("/proc/mounts").read_text()
    other.control("down")  # again does no harm
    other.folder.mkdir()  # for the fixture


def test_a_site_ends_with_the_tests_that_a_signal_ended(site: Site) -> None:
    program = (
        "from time import sleep\n"
        "from tests.site.conftest import running_site\n"
        "with running_site('--nodes', '1') as running:\n"
        "    print(running.folder, flush=True)\n"
        "    sleep(600)\n"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as tests:
        assert tests.stdout is not None
        folder = Path(tests.stdout.readline().strip())
        process_1 = Path("/proc", (folder / "login.pid").read_text().split()[0])
        assert process_1.exists()
        tests.terminate()
    site.wait(lambda: not process_1.exists() and not folder.exists(), 30)


def _mentions(cmdline: Path, text: str) -> bool:
    try:
        return text in cmdline.read_bytes().decode("utf-8", "replace").replace("\0", " ")
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_down_never_removes_a_folder_it_did_not_make(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    refused = Site(tmp_path).control("down", check=False)
    assert refused.returncode == 2
    assert "not a site's folder" in refused.stderr
    assert (tmp_path / "thesis.tex").exists()
