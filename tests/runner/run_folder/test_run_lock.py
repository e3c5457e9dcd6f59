"""Two launchers in one run folder: the second is rejected; a dead launcher blocks nobody."""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from runner.from_stage import IncompleteError, UsageError
from runner.processes import birth_time
from runner.run_folder import run_lock as holder_module
from runner.run_folder.layout import RunFolder
from runner.run_folder.run_lock import (
    GONE_AFTER_S,
    RunLock,
    check_not_held,
    hold_run_folder,
    holder_of,
)
from tests.first_job.harness import programs
from tests.runner.conftest import Cluster
from tests.runner.training.test_resume import site_folder
from tests.support.waiting import wait_for

ME = RunLock.me({})
ELSEWHERE = replace(ME, host="gpu7", machine="another boot", pid=4711, job=17, since=time.time())


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "my run's")
    folder.make()
    return folder


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def squeue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], object]:
    """A cluster whose squeue runs these lines of sh."""
    monkeypatch.setenv("PATH", programs(tmp_path / "bin"))
    return lambda body: programs(tmp_path / "bin", squeue=body)


def held_by(folder: RunFolder, holder: RunLock, age_s: float = 0) -> None:
    folder.holder.parent.mkdir(exist_ok=True)
    folder.holder.write_text(json.dumps(asdict(holder)))
    os.utime(folder.holder, (time.time() - age_s,) * 2)


def of_process(pid: int) -> RunLock:
    return replace(ME, pid=pid, born=birth_time(pid))


def test_a_place_is_left_after_the_end_and_after_a_fault(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holder_module, "TOUCH_EVERY_S", 0.01)
    with hold_run_folder(folder, {}):
        assert holder_of(folder, ME) is not None
        os.utime(folder.holder, (1, 1))  # the sign of life, for other machines
        wait_for(lambda: folder.holder.stat().st_mtime > 1)
    assert not folder.holder.exists()
    with hold_run_folder(folder, {}):
        held_by(folder, ELSEWHERE)  # another machine took it over
    assert folder.holder.exists()
    shutil.rmtree(folder.holder.parent)
    with pytest.raises(RuntimeError), hold_run_folder(folder, {}):
        raise RuntimeError("whatever")
    assert not folder.holder.exists()


def test_a_killed_holder_blocks_nobody_not_even_before_its_parent_has_counted_it(
    folder: RunFolder, other: subprocess.Popen[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    gone = of_process(other.pid)
    held_by(folder, gone)
    other.kill()
    wait_for(lambda: birth_time(other.pid) in ("gone", None))
    with hold_run_folder(folder, {}):
        assert f"left by process {other.pid}" in capsys.readouterr().err
    assert list(folder.root.glob("running*")) == []


def test_a_process_that_got_the_number_of_a_killed_one_is_another(
    folder: RunFolder, other: subprocess.Popen[bytes]
) -> None:
    held_by(folder, replace(of_process(other.pid), born="1"))
    assert holder_of(folder, ME) is None


@pytest.mark.parametrize(
    ("body", "gone"),
    [
        ("echo RUNNING", False),
        ("echo PENDING", False),  # requeued: it comes back
        ("echo COMPLETED", True),
        ("exit 0", True),
        ("echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1", True),
    ],
)
def test_a_job_elsewhere_holds_the_folder_as_long_as_slurm_says_it_lives(
    folder: RunFolder, squeue: Callable[[str], object], body: str, gone: bool
) -> None:
    squeue(body)
    # However long ago it gave a sign: a filesystem may be slow to tell.
    held_by(folder, ELSEWHERE, age_s=0 if gone else 10 * GONE_AFTER_S)
    assert (holder_of(folder, ME) is None) == gone


KILLED = replace(ME, born="1", job=17, since=time.time())
"""A launcher that srun was started from, on this machine."""


@pytest.mark.parametrize(
    ("state", "step", "gone"),
    [
        (
            "RUNNING",
            f"17.3|runner-{platform.node()}-{KILLED.pid}",
            False,
        ),  # srun was killed too, its ranks train on
        ("RUNNING", "17.3|bash", True),
        ("RUNNING", f"17.3|runner-{platform.node()}-{KILLED.pid}0", True),
        ("COMPLETING", "", False),  # Slurm no longer tells of steps that still end
        ("COMPLETED", "", True),
    ],
    ids=["its step", "another step", "a step of a like name", "completing", "completed"],
)
def test_a_killed_launcher_of_a_job_holds_the_folder_as_long_as_its_ranks_run(
    folder: RunFolder, squeue: Callable[[str], object], state: str, step: str, gone: bool
) -> None:
    squeue(f"case \"$*\" in *--steps*) echo '{step}' ;; *) echo {state} ;; esac")
    held_by(folder, KILLED, age_s=10 * GONE_AFTER_S)
    if gone:
        with hold_run_folder(folder, {"SLURM_JOB_ID": "17"}):
            return
    with pytest.raises(UsageError) as refused:
        check_not_held(folder, {"SLURM_JOB_ID": "17"})
    said = str(refused.value)
    assert (
        "was killed, and its ranks still run (step 17.3)" in said and "scancel 17.3" in said
    ) == (step != "")


@pytest.mark.parametrize("holder", [ELSEWHERE, KILLED], ids=["elsewhere", "killed"])
def test_where_slurm_does_not_answer_the_signs_of_life_decide(
    folder: RunFolder, squeue: Callable[[str], object], holder: RunLock
) -> None:
    """Of a killed launcher, too, whose ranks may still train."""
    squeue("echo 'Unable to contact slurm controller' >&2; exit 1")
    held_by(folder, holder, age_s=GONE_AFTER_S - 60)
    assert holder_of(folder, ME) == holder
    held_by(folder, holder, age_s=GONE_AFTER_S + 60)
    assert holder_of(folder, ME) is None
    (folder.logs / "rank-3.pulse").write_text("{}")  # a rank gets on
    assert holder_of(folder, ME) == holder


def test_a_requeued_job_takes_its_place_again_at_once_and_a_second_step_of_it_does_not(
    folder: RunFolder,
) -> None:
    held_by(folder, ELSEWHERE)
    with pytest.raises(UsageError, match=r"job 17"):
        check_not_held(folder, {"SLURM_JOB_ID": "17"})
    with hold_run_folder(folder, {"SLURM_JOB_ID": "17", "SLURM_RESTART_COUNT": "1"}):
        pass


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"pid": 1}', json.dumps({**asdict(ME), "pid": "x"})]
)
def test_a_torn_word_of_a_holder_blocks_nobody_for_long(folder: RunFolder, text: str) -> None:
    folder.holder.parent.mkdir()
    folder.holder.write_text(text)
    os.utime(folder.holder, (time.time() - 5,) * 2)
    with hold_run_folder(folder, {}):
        pass


def test_a_lock_that_is_made_while_another_looks_is_not_moved_aside(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once no lock was taken for a torn one, and two launchers trained in one run folder."""
    real, looks = holder_module._read, list[object]()

    def look(path: Path) -> RunLock | None:
        looks.append(real(path))
        if len(looks) == 2:
            held_by(folder, ME)
        return looks[-1]  # type: ignore[return-value]

    monkeypatch.setattr(holder_module, "_read", look)
    holder_module._move_aside(folder, folder.holder, ME)
    assert list(folder.root.glob("running-left*")) == []


def test_a_lock_that_another_took_after_the_same_torn_one_is_not_moved_aside(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, looks = holder_module._read, list[object]()
    folder.holder.parent.mkdir()
    folder.holder.write_text("")
    os.utime(folder.holder, (time.time() - 5,) * 2)

    def look(path: Path) -> RunLock | None:
        looks.append(real(path))
        if len(looks) == 2:  # now the other one is quicker
            monkeypatch.setattr(holder_module, "_read", real)
            holder_module._move_aside(folder, folder.holder, ME)
            held_by(folder, ME)
        return looks[-1]  # type: ignore[return-value]

    monkeypatch.setattr(holder_module, "_read", look)
    holder_module._move_aside(folder, folder.holder, ME)
    assert real(folder.holder) == ME


def test_of_many_who_come_at_once_after_a_killed_one_exactly_one_trains(folder: RunFolder) -> None:
    held_by(folder, replace(ME, born="1"))
    inside, most, refused = [0], [0], []
    start, guard, over = threading.Barrier(8), threading.Lock(), threading.Event()

    def come() -> None:
        start.wait()
        try:
            with hold_run_folder(folder, {}):
                with guard:
                    inside[0] += 1
                    most[0] = max(most[0], inside[0])
                over.wait(120)  # until all others were refused
                with guard:
                    inside[0] -= 1
        except UsageError as error:
            refused.append(error)
            if len(refused) == 7:
                over.set()

    threads = [threading.Thread(target=come) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (most[0], len(refused)) == (1, 7)


def test_a_full_disk_leaves_no_empty_word_behind(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("json.dumps", full)
    with pytest.raises(IncompleteError, match="No space left"), hold_run_folder(folder, {}):
        pass
    assert not folder.holder.exists()


def test_train_is_refused_beside_another_while_check_and_dry_run_only_tell_and_status_says_running(
    cluster: Cluster, other: subprocess.Popen[bytes]
) -> None:
    cluster.write()
    folder = RunFolder(cluster.output())
    folder.make()
    held_by(folder, of_process(other.pid))
    refused = cluster.refused("train", "tiny.yaml", "--processes", "1")
    assert f"process {other.pid} on " in refused and "--output" in refused
    assert sorted(p.name for p in folder.root.iterdir()) == ["checkpoints", "logs", "running"]
    dry = cluster.run("train", "tiny.yaml", "--processes", "1", "--dry-run")
    assert dry.returncode == 0 and f"process {other.pid} on " in dry.stdout


# As soon as the child that prepares writes, the launcher stops it and is killed. A child that did
# not end with its launcher would stay stopped, and would hold what it writes.
KILLS_ITS_LAUNCHER = """
import glob, os, signal, sys, threading, time
def watch():
    while not glob.glob("output/.stores/*.tmp"):
        time.sleep(0.001)
    for name in glob.glob("/proc/self/task/*/children"):
        for child in open(name).read().split():
            os.kill(int(child), signal.SIGSTOP)
    os.kill(os.getpid(), signal.SIGKILL)
if "train" in sys.orig_argv:
    threading.Thread(target=watch, daemon=True).start()
"""


def test_a_preparation_does_not_outlive_its_killed_launcher_and_the_next_one_prepares(
    cluster: Cluster,
) -> None:
    cluster.write()
    killed = cluster.start(
        "train", "tiny.yaml", "--processes", "1", **site_folder(cluster, KILLS_ITS_LAUNCHER)
    )
    _, said = killed.communicate(timeout=120)  # it has the same stderr: this is its end
    assert (killed.returncode, "Traceback" in said) == (-signal.SIGKILL, False), said
    assert cluster.run("prepare", "tiny.yaml").returncode == 0
    assert not list((cluster.folder / "output/.stores").glob("*.tmp"))
