"""`node-local.sh`: one unpack per node for all jobs, complete or absent, if the process is killed.

The environment is small and its bootstrap.sh slow enough to be caught in the act; node-local.sh is
the real one.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import tarfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from stage.files import sha256_of_bytes
from tests.support.node import SHELLS, TEMPLATES
from tests.support.waiting import wait_for

MADE = ("bin/python", *(f"lib/{number}.py" for number in range(6)), "lib/a b.py", "lib/link")
LISTED = "".join(f"- {'0' * 64} {path}\n" for path in MADE)  # .airlift/tree.txt
TREE = sha256_of_bytes(LISTED.encode())
BOOTSTRAP = """\
set -eu
here=${0%/*}
echo unpacking $$ >>"$here/unpacked"
mkdir "$1.part.$$"
tar -xzf "$here/image.tar.gz" -C "$1.part.$$"
while [ -e "$here/slow" ]; do sleep 0.05; done
mv "$1.part.$$" "$1"
echo "made; tree and so on"
"""


@dataclass
class Node:
    """The asset's folder on the shared disk, and a root on the node's own."""

    folder: Path
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def asset(self) -> Path:
        return self.folder / "asset"

    @property
    def root(self) -> Path:
        return self.folder / "root"

    @property
    def base(self) -> Path:
        return self.root / f"airlift-{os.getuid()}"

    @property
    def prefix(self) -> Path:
        return self.base / TREE[:16]

    @property
    def unpacked(self) -> int:
        """How often it was unpacked."""
        log = self.asset / "unpacked"
        return len(log.read_text().splitlines()) if log.exists() else 0

    def make(self) -> None:
        self.asset.mkdir()
        self.root.mkdir()
        files = self.folder / "files"
        (files / "bin").mkdir(parents=True)
        (files / "bin" / "python").write_text("#!/bin/sh\nexec sleep 60\n")
        (files / "bin" / "python").chmod(0o755)
        (files / "lib").mkdir()
        for path in MADE[1:-1]:
            (files / path).write_text("")
        (files / "lib" / "link").symlink_to("0.py")
        (files / ".airlift").mkdir()
        (files / ".airlift" / "tree.txt").write_text(LISTED)
        (files / ".airlift" / "env.json").write_text("{}")
        with tarfile.open(self.asset / "image.tar.gz", "w:gz") as tar:
            tar.add(files, ".")
        facts = {
            "files": 9,
            "format": 1,
            "modules": 0,
            "size": 4096,
            "tree": TREE,
            "virtual_packages": {"tree": "not"},
        }
        (self.asset / "env.json").write_text(json.dumps(facts, indent=1, sort_keys=True) + "\n")
        (self.asset / "bootstrap.sh").write_text(BOOTSTRAP)
        (self.asset / "node-local.sh").write_bytes((TEMPLATES / "node-local.sh").read_bytes())

    def start(self, *shell: str) -> subprocess.Popen[str]:
        command = [*(shell or ("sh",)), str(self.asset / "node-local.sh"), str(self.root)]
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            command, stdout=pipe, stderr=pipe, text=True, start_new_session=True
        )
        self.started.append(process)
        return process

    def run(self, *shell: str, code: int = 0) -> str:
        """Runs it to the end; what it said."""
        out, said = self.start(*shell).communicate(timeout=60)
        assert self.started[-1].returncode == code, said
        assert out == (f"{self.prefix}\n" if code == 0 else "")
        return said

    def slow(self) -> None:
        (self.asset / "slow").touch()

    def quick(self) -> None:
        (self.asset / "slow").unlink()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
    node.make()
    yield node
    for process in node.started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.mark.parametrize("shell", SHELLS, ids=" ".join)
def test_the_first_job_unpacks_and_later_ones_find_it_there(node: Node, shell: list[str]) -> None:
    said = node.run(*shell)
    assert f"unpacked 11 files to {node.prefix}" in said
    assert (node.prefix / "lib" / "link").is_symlink()
    assert f"reusing {node.prefix}, 9 files" in node.run(*shell)
    assert node.unpacked == 1
    assert node.base.stat().st_mode & 0o777 == 0o700
    assert not list(node.base.glob("*.lock")) + list(node.base.glob("*.part*"))


def have_said_something(processes: Sequence[subprocess.Popen[str]]) -> int:
    """How many have written to stderr, which is not read here."""
    return len(select.select([p.stderr for p in processes if p.stderr], [], [], 0)[0])


def test_many_at_once_unpack_once(node: Node) -> None:
    node.slow()
    processes = [node.start() for _ in range(6)]
    wait_for(lambda: node.unpacked)
    wait_for(lambda: len(list(node.base.glob("*.lock"))) == 1)
    wait_for(lambda: have_said_something(processes) >= 5)  # the five that wait
    node.quick()
    said = [process.communicate(timeout=60) for process in processes]
    assert [out for out, _ in said] == [f"{node.prefix}\n"] * 6
    assert node.unpacked == 1
    assert any("waiting: process" in err for _, err in said)


def test_who_waits_for_a_job_that_is_killed_takes_over(node: Node) -> None:
    node.slow()
    first = node.start()
    wait_for(lambda: node.unpacked == 1)
    second = node.start()
    wait_for(lambda: have_said_something([second]))
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    wait_for(lambda: node.unpacked == 2)
    node.quick()
    out, said = second.communicate(timeout=60)
    assert (second.returncode, out) == (0, f"{node.prefix}\n"), said
    assert f"took over from process {first.pid}" in said


@pytest.mark.parametrize("shell", SHELLS, ids=" ".join)
def test_an_environment_that_lost_files_to_a_sweep_is_unpacked_again(
    node: Node, shell: list[str]
) -> None:
    node.run(*shell)
    (node.prefix / "lib" / "__pycache__").mkdir()
    for number in range(5):  # more than there were is fine, and does not make up for what is lost
        (node.prefix / "lib" / "__pycache__" / f"{number}.cpython-310.opt-1.pyc").touch()
    assert "reusing" in node.run(*shell)
    for lost, said in (
        ("lib/a b.py", "lost files (1 of 9 files, such as lib/a b.py); unpacking it again"),
        ("lib/link", "lost files (1 of 9 files, such as lib/link)"),
        ("bin/python", "lost files (bin/python)"),
        (".airlift/env.json", "lost files (.airlift/env.json)"),
        (".airlift/tree.txt", "lost files (.airlift/tree.txt)"),
    ):
        (node.prefix / lost).unlink()
        assert said in node.run(*shell)
        assert os.path.lexists(node.prefix / lost)


def test_an_environment_that_lost_files_is_not_taken_from_under_a_job(node: Node) -> None:
    """/proc tells where a program is; a root such as /scratch is often a link to that place."""
    (node.folder / "disk").mkdir()
    node.root.rmdir()
    node.root.symlink_to(node.folder / "disk")
    node.run()
    sleep = node.prefix / "bin" / "sleep"
    sleep.write_bytes(Path("/bin/sleep").read_bytes())
    sleep.chmod(0o755)
    job = subprocess.Popen([sleep, "60"])
    try:
        (node.prefix / "lib" / "3.py").unlink()
        said = node.run(code=5)
        assert "such as lib/3.py), and a job still runs from it: it is left as it is" in said
        assert sleep.exists()
        assert node.unpacked == 1
        assert not list(node.base.glob("*.lock"))
    finally:
        job.kill()
        job.wait()
    assert "unpacking it again" in node.run()


def older(node: Node, name: str, days: float) -> Path:
    """Another environment, used so many days ago."""
    other = node.base / name
    (other / "bin").mkdir(parents=True)
    (other / "bin" / "sleep").write_bytes(Path("/bin/sleep").read_bytes())
    (other / "bin" / "sleep").chmod(0o755)
    stamp = node.base / f"{name}.used"
    stamp.touch()
    os.utime(stamp, (time.time() - days * 86400,) * 2)
    return other


def gone() -> int:
    """The number of a process that has ended."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


@pytest.mark.parametrize("shell", SHELLS, ids=" ".join)
def test_what_killed_jobs_left_is_removed_and_nothing_else(node: Node, shell: list[str]) -> None:
    node.run(*shell)
    dead, alive = gone(), os.getpid()
    parts = {
        f"other.part.{dead}": 2, f"other.part.broken.{dead}": 2, f"other.lock.stale.{dead}": 2,
        "other.part.gone": 2,
        f"other.part.{alive}": 2, f"young.part.{dead}": 0.5,
    }  # fmt: skip
    for name, days in parts.items():
        (node.base / name / "lib").mkdir(parents=True)
        os.utime(node.base / name, (time.time() - days * 86400,) * 2)
    stale, held, unstamped = (
        older(node, "stale", 20),
        older(node, "held", 20),
        older(node, "unstamped", 20),
    )
    (node.base / "unstamped.used").unlink()
    job = [str(older(node, "running", 20) / "bin/sleep"), "60"]
    node.started.append(subprocess.Popen(job, text=True, start_new_session=True))
    born = Path(f"/proc/{alive}/stat").read_text().rpartition(") ")[2].split()[19]
    for name, holder in (
        ("stale", f"{dead} 1"),
        ("held", f"{alive} {born}"),
        ("never", f"{dead} 1"),
    ):
        lock = node.base / f"{name}.lock"
        lock.mkdir()
        (lock / "holder").write_text(f"{os.uname().nodename} {holder}\n")
        os.utime(lock, (time.time() - 20 * 86400,) * 2)
    said = node.run(*shell)
    assert f"removing {stale} (1 files): not used for 14 days" in said
    assert (stale.exists(), held.exists(), unstamped.exists()) == (False, True, True)
    names = {path.name for path in node.base.iterdir()}
    assert sorted(name for name in names if not name.startswith(node.prefix.name)) == sorted([
        "held", "held.lock", "held.used", f"other.part.{alive}", "running", "running.used",
        "unstamped", "unstamped.used", f"young.part.{dead}",
    ])  # fmt: skip


@pytest.mark.parametrize("how", ["open", "link"])
def test_a_folder_that_others_could_write_is_not_trusted(node: Node, how: str) -> None:
    if how == "open":
        node.base.mkdir()
        node.base.chmod(0o777)
    else:
        (node.folder / "elsewhere").mkdir(mode=0o700)
        node.base.symlink_to(node.folder / "elsewhere")
    assert "not a folder of yours alone" in node.run(code=1)
