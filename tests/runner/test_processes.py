"""Whether a process is alive, with real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from runner.processes import birth_time, is_alive
from tests.support.waiting import wait_for

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc")


def test_a_process_that_ended_is_not_alive_although_its_parent_has_not_reaped_it() -> None:
    child = subprocess.Popen(["sleep", "60"])
    born = birth_time(child.pid)
    assert is_alive(child.pid, born) and is_alive(child.pid)
    child.kill()
    wait_for(lambda: birth_time(child.pid) == "gone")
    assert not is_alive(child.pid, born)
    child.wait()
    assert not is_alive(child.pid)


def test_another_process_with_the_same_number_does_not_count() -> None:
    born = birth_time(os.getpid())
    assert born is not None
    assert is_alive(os.getpid(), born) and not is_alive(os.getpid(), str(int(born) + 1))


LIMITED = """
import resource, sys
from pathlib import Path
soft = {"NOFILE": 256, "MEMLOCK": 0, "CORE": resource.getrlimit(resource.RLIMIT_CORE)[1]}
for name, limit in soft.items():
    kind = getattr(resource, f"RLIMIT_{name}")
    resource.setrlimit(kind, (limit, resource.getrlimit(kind)[1]))
from runner.training.rank import become_rank
from runner.run_folder.layout import RunFolder
place = {"RANK": "0", "WORLD_SIZE": "400", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "400"}
become_rank(RunFolder(Path(sys.argv[1])), place | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"})
for name in soft:
    print(name, *resource.getrlimit(getattr(resource, f"RLIMIT_{name}")))
"""


def limits_of_a_rank(folder: Path) -> dict[str, list[int]]:
    """Soft and hard limits of a rank that was started with low soft ones."""
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(folder)], capture_output=True, text=True, check=True
    )
    lines = done.stdout.splitlines()
    return {line.split()[0]: list(map(int, line.split()[1:])) for line in lines[-3:]}


def test_a_rank_may_open_as_many_files_as_the_system_allows_and_leaves_no_core(
    tmp_path: Path,
) -> None:
    """The usual soft limit of 1024 open files ends a run near 300 ranks."""
    limits = limits_of_a_rank(tmp_path)
    soft, hard = limits["NOFILE"]
    assert soft == min(hard, 2**20) > 256
    assert limits["MEMLOCK"][0] == limits["MEMLOCK"][1]
    assert limits["CORE"][0] == 0
