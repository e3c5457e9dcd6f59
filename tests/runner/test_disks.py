"""Compiler caches are on the node's own disk, in every way of starting, and nobody else's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

import pytest

from runner import disks
from runner.disks import CACHES, local_folder, use_local_caches, user_variables
from runner.from_stage import UsageError

MOUNTS = "/dev/sda1 / ext4 rw 0 0\nfs@tcp:/lus /lus lustre rw 0 0\nnas:/home /home nfs4 rw 0 0\n"
OWN = f"airlift-{os.getuid()}"


@pytest.mark.parametrize(
    ("environ", "expected", "avoided"),
    [
        ({}, f"/tmp/{OWN}-local", ""),
        ({"TMPDIR": "/local"}, f"/local/{OWN}-local", ""),
        ({"SLURM_TMPDIR": "/local/7", "SLURM_JOB_ID": "7"}, f"/local/7/{OWN}-7", ""),
        ({"TMPDIR": "/lus/tmp", "SLURM_JOB_ID": "7"}, f"/tmp/{OWN}-7", "(lustre)"),
        ({"SLURM_TMPDIR": "/home/me/tmp"}, f"/tmp/{OWN}-local", "(nfs4)"),
    ],
)
def test_a_temporary_folder_on_a_network_disk_is_avoided_and_told(
    environ: dict[str, str], expected: str, avoided: str
) -> None:
    folder, line = local_folder(environ, MOUNTS)
    assert str(folder) == expected
    assert avoided in line and bool(avoided) is bool(line)


def test_what_the_user_set_stays_and_a_network_disk_in_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disks, "read_mounts", lambda: MOUNTS)
    environ = {"TMPDIR": str(tmp_path), "TRITON_CACHE_DIR": "/home/me/.triton"}
    (line,) = use_local_caches(environ)
    assert line.startswith("TRITON_CACHE_DIR=/home/me/.triton is on a network disk (nfs4)")
    assert environ.pop("TRITON_CACHE_DIR") == "/home/me/.triton"
    inside = [value for name, value in environ.items() if name in CACHES]
    assert len(inside) == 2 and all(value.startswith(f"{tmp_path}/{OWN}") for value in inside)
    assert (tmp_path / f"{OWN}-local").stat().st_mode & 0o777 == 0o700


def test_a_rank_waits_for_a_build_that_runs_and_not_for_one_of_a_killed_start(
    tmp_path: Path,
) -> None:
    """torch keeps waiting for the file `lock`, also for that of a job that was requeued."""
    lock = tmp_path / f"{OWN}-7" / "torch_extensions" / "cpu_adam" / "lock"
    lock.parent.mkdir(parents=True)
    lock.parents[2].chmod(0o700)
    use = "import os; from runner.disks import use_local_caches; use_local_caches(os.environ); "
    environ = {**os.environ, "TMPDIR": str(tmp_path), "SLURM_JOB_ID": "7"}
    run = [sys.executable, "-c", f"{use} print(); input(); os.kill(os.getpid(), 9)"]
    lock.touch()
    for _ in ("launcher and ranks of a start", "the start after it was killed"):
        with subprocess.Popen(run, env=environ, stdin=PIPE, stdout=PIPE) as rank:
            assert rank.stdout is not None and rank.stdout.readline()
            assert not lock.exists()
            lock.touch()
            subprocess.run([sys.executable, "-c", use], env=environ, check=True)
            assert lock.exists()
            rank.communicate(b"\n")


def test_compiled_code_that_another_user_could_have_put_there_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for base in (tmp_path / "tmpdir", tmp_path / "tmp"):
        (base / f"{OWN}-local").mkdir(parents=True)
        (base / f"{OWN}-local").chmod(0o777)
    monkeypatch.setattr(disks, "LAST_RESORT", tmp_path / "tmp")
    with pytest.raises(UsageError, match="not a folder that only you can write"):
        use_local_caches({"TMPDIR": str(tmp_path / "tmpdir")})


def test_a_user_without_a_name_gets_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch asks for one while it is imported: "getpwuid(): uid not found"."""
    assert user_variables({}) == {}
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)
    assert user_variables({}) == {"LOGNAME": f"uid{2**31 - 7}"}
    assert user_variables({"USER": "ada"}) == {}


def test_a_temporary_folder_that_this_node_lacks_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(disks, "LAST_RESORT", tmp_path / "tmp")
    environ = {"TMPDIR": str(tmp_path / "file")}
    (line,) = use_local_caches(environ)
    assert (
        line.startswith(f"compiler caches are in {tmp_path}/tmp/") and "cannot be created" in line
    )
