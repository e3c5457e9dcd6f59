"""Rights, inodes, quota, places, settings and texts: found by `check`, with the real fault."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runner.config.run_config import RunConfig
from runner.from_stage import (
    DamageError,
    IncompleteError,
    PolicyError,
    UsageError,
    join_errors,
)
from runner.job.access import (
    check_quota,
    disk_needed,
    disk_still_needed,
    find_private_places,
    quota_left,
)
from runner.job.findings import FAULTS
from runner.job.shapes import ModelShape
from tests.first_job.harness import programs
from tests.remedies.obeyed import in_it, obeys
from tests.runner.conftest import Cluster

ACCESS = "runner/job/access.py"
NOBODY = 65534


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user can enter; tmp_path is closed to others."""
    folder = Path(tempfile.mkdtemp(prefix="airlift-test-"))
    folder.chmod(0o755)
    yield folder
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o755)
    shutil.rmtree(folder)


def as_nobody(code: str, *arguments: Path) -> str:
    """Runs Python code as a user without rights; returns what a StageError says."""
    root = Path(__file__).parents[3]
    start = f"""
import os, sys
sys.path.insert(0, {str(root)!r})
from pathlib import Path
from runner.from_stage import StageError
from runner.exec.user_script import _check_can_start
from runner.job.access import check_readable, check_writable
if os.geteuid() == 0:
    os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})
try:
    {code}
except StageError as error:
    print(error.exit_code, error)
"""
    done = subprocess.run(
        [sys.executable, "-c", start, *map(str, arguments)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@obeys(ACCESS, "Its owner can open it: chmod {} {} (`namei -l {}` shows every right on the way)")
def test_files_that_a_colleague_may_not_read_are_closed_and_not_damaged(open_folder: Path) -> None:
    folder = open_folder / "data"
    folder.mkdir()
    for name in ("one", "two"):
        (folder / name).write_text("x")
    paths = [folder / "one", folder / "two"]
    check = "check_readable(map(Path, sys.argv[1:]))"
    assert as_nobody(check, *paths) == ""
    (folder / "one").chmod(0)
    said = as_nobody(check, *paths)
    assert said.startswith("2 1 file of this run cannot be read") and "it is not damaged" in said
    subprocess.run(in_it(said, r"chmod a\+r \S+"), shell=True, check=True)
    assert as_nobody(check, *paths) == ""
    folder.chmod(0)
    said = as_nobody(check, *paths)
    assert "2 files" in said and f"{folder} cannot be entered" in said
    subprocess.run(in_it(said, r"chmod a\+rx \S+"), shell=True, check=True)
    assert as_nobody(check, *paths) == ""


@obeys(ACCESS, "Choose {}, in a folder of yours (`ls -ld {}` and `id` show who may write)")
def test_a_run_folder_that_cannot_be_written_is_refused(open_folder: Path) -> None:
    said = as_nobody("check_writable(Path(sys.argv[1]))", open_folder / "output" / "run")
    assert said.startswith(f"2 {open_folder}/output/run: no file can be made in {open_folder}")
    assert "Permission denied" in said
    (open_folder / "mine").mkdir()
    (open_folder / "mine").chmod(0o777)
    assert as_nobody("check_writable(Path(sys.argv[1]))", open_folder / "mine" / "run") == ""


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("/lustre 1000 0 4000 - 12 0 100 -\n", (3000 * 1024, 88)),
        ("/lustre 4100* 0 4000 6d23h 12 0 0 -\n", (0, None)),
        ("/lustre/a/long/path\n      1000 0 0 - 12 0 0 -\n", (None, None)),
        ("/lustre [1000] 0 4000 - 12 0 100 -\n", (3000 * 1024, 88)),
        ("Permission denied.\n", None),
        ("", None),
    ],
)
def test_the_quota_of_lustre_is_read(text: str, left: tuple[int | None, int | None] | None) -> None:
    assert quota_left(text) == left


@obeys(ACCESS, "Free space ({}), keep fewer: --set checkpoint.keep=1, or choose {}")
def test_a_quota_that_leaves_too_little_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"/ 1000 0 0 0 12 0 0 0\n{tmp_path} 1000 3000 4000 0 12 0 9999 0"
    path = programs(tmp_path / "bin", quota=f'[ "$1 $2" = "-w -p" ] && echo "{text}"')
    monkeypatch.setenv("PATH", path)
    check_quota(tmp_path / "run", 2**20, "")
    with pytest.raises(IncompleteError, match=r"your quota leaves 3\.07 MB") as refused:
        check_quota(tmp_path / "run", 2**30, "")
    assert "Free space (quota -s)" in refused.value.remedy
    check_quota(tmp_path.parent / "another", 2**30, "")
    programs(tmp_path / "bin", quota=f'echo "{text.replace("9999", "20")}"')
    with pytest.raises(IncompleteError, match="your quota leaves 8 files"):
        check_quota(tmp_path / "run", 2**20, "")


@pytest.mark.parametrize(
    ("run", "trained", "needed"),
    [
        ({}, None, 1000 * (16 * 3 + 4)),  # two are kept, and one is written
        ({"lora": {"rank": 4}, "engine": {"zero": 3}}, 10, (16 * 10 + 4 * 1000) * 3 + 4 * 10),
        ({"lora": {"merge": True}, "engine": {"name": "ddp"}}, 10, 16 * 10 * 3 + 4 * 1000),
        ({"lora": {"rank": 4}, "engine": {"zero": 2}}, 10, 16 * 10 * 3 + 4 * 10),
        ({"checkpoint": {"keep": 1, "best": True}}, None, 1000 * (16 * 3 + 4)),
    ],
)
def test_what_checkpoints_and_the_model_take_on_the_disk(
    tmp_path: Path, run: dict[str, Any], trained: int | None, needed: int
) -> None:
    config = RunConfig.load(Cluster(tmp_path, tmp_path).write(**run))
    shape = replace(ModelShape(1000, 512, 64, 2, 100), num_trained=trained)
    assert disk_needed(config, shape) == needed
    (tmp_path / "step-2").mkdir()
    (tmp_path / "step-2/weights").write_bytes(bytes(50))
    assert [disk_still_needed(config, tmp_path, whole) for whole in (needed, 60)] == [
        needed - 50,
        20,  # a checkpoint replaces another when it is whole
    ]


MOUNTS = """\
sysfs / ext4 rw 0 0
tmpfs /dev/shm tmpfs rw 0 0
tmpfs /run/user tmpfs rw 0 0
server:/home /home nfs4 rw 0 0
mds@o2ib:/lfs /lfs lustre rw 0 0
mds@o2ib:/lfs /tmp/of-lustre lustre rw 0 0
/dev/sdb /local xfs rw 0 0
"""


@pytest.mark.parametrize(
    ("path", "is_local"),
    [
        ("/tmp/me/output", True),
        ("/local/me/output", True),
        ("/dev/shm/bundle", True),
        ("/run/user/7/bundle", True),
        ("/lfs/me/output", False),
        ("/home/me/output", False),
        ("/tmp/of-lustre/me", False),
        ("/opt/bundle", False),  # of the node's disk, but perhaps on every node
        ("/tmpfiles/me", False),
    ],
)
def test_a_folder_that_only_this_node_has_is_told(path: str, *, is_local: bool) -> None:
    found = find_private_places({"the bundle": Path(path)}, MOUNTS)
    assert [finding.level for finding in found] == ["warning"] * is_local


def test_several_faults_are_one_error_with_the_code_of_damage_if_there_is_any() -> None:
    usage, damage = UsageError("a", "fix a"), DamageError("b", "fix b")
    both = join_errors([usage, damage], FAULTS)
    assert isinstance(both, DamageError) and both.exit_code == 1
    assert "1. a\n     -> fix a" in str(both) and "2. b\n     -> fix b" in str(both)
    assert join_errors([usage], FAULTS) is usage
    assert join_errors([IncompleteError("c"), PolicyError("d")], FAULTS).exit_code == 5
