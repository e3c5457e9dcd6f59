"""Kills, stops and damage: whatever happens to a run, the same command goes on as if nothing had."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.runner.conftest import Cluster, metrics

# Runs in every Python process that has its folder on PYTHONPATH. Rank 1 or 0 is killed by itself, as by the kernel's
# out-of-memory killer, when it is about to do the named thing; the second time nothing happens.
SITE_CUSTOMIZE = """
import os, signal, sys
rank, event, ending = os.environ["KILL_RANK"], os.environ["KILL_EVENT"], os.environ["KILL_AT"]
flag = os.environ["KILL_FLAG"]
def hook(name, arguments):
    if name == event and os.environ.get("RANK") == rank and str(arguments[0]).endswith(ending):
        try:
            os.close(os.open(flag, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(hook)
"""


@pytest.fixture(scope="module")
def undisturbed(shared_cluster: Cluster) -> dict[int, Path]:
    """The same run at stage 0 and stage 2, left alone."""
    folders = {}
    for stage in (0, 2):
        shared_cluster.write(f"undisturbed{stage}", engine={"zero": stage})
        folders[stage] = shared_cluster.trained(f"undisturbed{stage}")
    return folders


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Polls until it holds; the run must not end before."""
    deadline = time.monotonic() + 180
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def steps_done(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_text().count('"loss"') if path.exists() else 0


def rank_pids(launcher: int) -> list[int]:
    """Process ids of the ranks that a launcher started, rank 0 first."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            environ = dict(pair.partition("=")[::2] for pair in (entry / "environ").read_text().split("\0"))
        except OSError:
            continue
        if parent == launcher and "RANK" in environ:
            found[int(environ["RANK"])] = int(entry.name)
    return [found[rank] for rank in sorted(found)]


def assert_same_story(folder: Path, expected: Path) -> None:
    """Bit for bit: every step once, with the loss, rate and norm of the undisturbed run."""
    for key in ("loss", "lr", "grad_norm", "validation_loss"):
        assert metrics(folder, key) == metrics(expected, key), key
    model = "model/model.safetensors"
    assert (folder / model).read_bytes() == (expected / model).read_bytes()


@pytest.mark.parametrize("stage", [0, 2])
def test_a_rank_killed_in_mid_step_costs_nothing_but_time(
    cluster: Cluster, undisturbed: dict[int, Path], stage: int
) -> None:
    cluster.write(engine={"zero": stage})
    process = cluster.start("train", "tiny.yaml", "--processes", "2")
    wait_for(lambda: steps_done(cluster.output()) >= 3, process)
    os.kill(rank_pids(process.pid)[1], signal.SIGKILL)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 5, err
    assert "Traceback" not in err
    done = cluster.run("train", "tiny.yaml", "--processes", "2")
    assert done.returncode == 0, done.stderr
    assert "resumed from step-" in done.stdout
    assert_same_story(cluster.output(), undisturbed[stage])


@pytest.mark.parametrize(
    ("rank", "event", "at"),
    [
        (1, "os.scandir", "step-4.tmp"),
        (0, "open", "step-4.tmp/files.json"),
        (0, "os.rename", "step-4.tmp"),
    ],
    ids=["after a rank wrote its part", "before the list", "before the rename"],
)
def test_a_rank_killed_in_mid_checkpoint_costs_nothing_but_time(
    cluster: Cluster, undisturbed: dict[int, Path], rank: int, event: str, at: str
) -> None:
    (cluster.folder / "site").mkdir()
    (cluster.folder / "site" / "sitecustomize.py").write_text(SITE_CUSTOMIZE)
    kill = {
        "PYTHONPATH": str(cluster.folder / "site"),
        "KILL_RANK": str(rank),
        "KILL_EVENT": event,
        "KILL_AT": at,
        "KILL_FLAG": str(cluster.folder / "killed"),
    }
    cluster.write(engine={"zero": 2})
    done = cluster.run("train", "tiny.yaml", "--processes", "2", **kill)
    assert (cluster.folder / "killed").exists(), done.stderr
    assert done.returncode == 5, done.stderr
    torn = list((cluster.output() / "checkpoints").glob("step-*.tmp"))
    assert len(torn) == 1
    assert not (torn[0].parent / torn[0].stem).exists()
    cluster.trained()
    assert_same_story(cluster.output(), undisturbed[2])
    assert not list((cluster.output() / "checkpoints").glob("*.tmp"))


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_stop_signal_saves_and_the_same_command_goes_on(
    cluster: Cluster, undisturbed: dict[int, Path], name: str
) -> None:
    cluster.write(engine={"zero": 2}, checkpoint={"every": 100, "keep": 2})
    process = cluster.start("train", "tiny.yaml", "--processes", "2")
    wait_for(lambda: steps_done(cluster.output()) >= 2, process)
    process.send_signal(getattr(signal, name))
    out, err = process.communicate(timeout=120)
    assert process.returncode == 5, (out, err)
    assert "run the same command again to resume" in err
    done = steps_done(cluster.output())
    assert done < 8
    assert (cluster.output() / "checkpoints" / f"step-{done}" / "files.json").exists()
    assert not (cluster.output() / "requeue").exists()
    cluster.trained()
    assert_same_story(cluster.output(), undisturbed[2])


@pytest.fixture
def finished(cluster: Cluster, undisturbed: dict[int, Path]) -> Path:
    """A copy of the undisturbed run at stage 2, as if it had run here."""
    cluster.write("undisturbed2", engine={"zero": 2})
    shutil.copytree(undisturbed[2], cluster.output("undisturbed2"))
    shutil.copytree(undisturbed[2].parent / ".stores", cluster.folder / "output" / ".stores")
    return cluster.output("undisturbed2")


def test_only_the_newest_checkpoints_are_kept(undisturbed: dict[int, Path]) -> None:
    folder = undisturbed[2] / "checkpoints"
    assert {path.name for path in folder.glob("step-*")} == {"step-6", "step-8"}
    assert (folder / "latest").read_text().strip() == "step-8"


@pytest.mark.parametrize("damage", ["flip", "truncate", "delete", "no list"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_taken(
    cluster: Cluster, finished: Path, undisturbed: dict[int, Path], damage: str
) -> None:
    newest = finished / "checkpoints" / "step-8"
    victim = newest / "engine" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    if damage == "flip":
        data = bytearray(victim.read_bytes())
        data[len(data) // 2] ^= 1
        victim.write_bytes(data)
    elif damage == "truncate":
        os.truncate(victim, victim.stat().st_size - 1)
    elif damage == "delete":
        victim.unlink()
    else:
        (newest / "files.json").unlink()
    done = cluster.run("train", "undisturbed2.yaml", "--processes", "2")
    assert done.returncode == 0, done.stderr
    assert "step-8" in done.stdout + done.stderr
    assert "resumed from step-6" in done.stdout
    assert_same_story(finished, undisturbed[2])


@pytest.mark.parametrize(
    ("change", "processes", "said"),
    [
        (("batch.global=16",), 2, ("batch.global", "8", "16")),
        (("seed=1",), 2, ("seed", "42", "1")),
        (("engine.zero=1",), 2, ("zero", "2", "1")),
        ((), 1, ("world_size", "2", "1")),
    ],
    ids=["batch", "seed", "stage", "ranks"],
)
def test_a_checkpoint_of_something_else_is_not_trained_on(
    cluster: Cluster, finished: Path, change: tuple[str, ...], processes: int, said: tuple[str, ...]
) -> None:
    before = (finished / "metrics.jsonl").read_bytes()
    options = [word for value in change for word in ("--set", value)]
    done = cluster.run("train", "undisturbed2.yaml", "--processes", str(processes), *options)
    assert done.returncode == 2, (done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    assert all(word in done.stderr for word in said), done.stderr
    assert (finished / "metrics.jsonl").read_bytes() == before


def test_a_longer_run_goes_on_where_the_shorter_one_ended(cluster: Cluster, finished: Path) -> None:
    done = cluster.run("train", "undisturbed2.yaml", "--processes", "2", "--set", "steps=10")
    assert done.returncode == 0, done.stderr
    assert "resumed from step-8" in done.stdout
    assert [step for step, _ in metrics(finished)] == list(range(1, 11))
