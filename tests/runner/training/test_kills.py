"""`kill -9` at 30 random moments and more: in steps, in saves, while a run starts or exports.

One run is killed again and again and resumed by the same command; once it is done, a new one
begins. After every kill, its log so far is the start of the undisturbed run's; at its end it is the
same, bit for bit. A kill hits a rank, the launcher, or all processes at once, as when a node loses
its power. AIRLIFT_KILL_SEED repeats one.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from runner.run_folder.heartbeat import LOAD, START, clear, read_pulse
from runner.run_folder.layout import read_metrics
from tests.runner.conftest import Cluster, assert_same_story, rank_pids

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

ENGINES: dict[str, dict[str, Any]] = {
    "zero2": {"zero": 2},
    "fsdp": {"name": "fsdp"},
    "ddp": {"name": "ddp"},
}
# Ten moments per engine: the phase of the run when it dies.
AIMS = ("start", "start", "train", "train", "train", "train", "save", "save", "save", "export")
VICTIMS = ("everything", "everything", "launcher", "rank 0", "rank 1")
STEPS = 12
RECORDED = ("step", "loss", "lr", "grad_norm", "validation_loss")
MOST_LIVES = 40


def recorded(folder: Path) -> list[dict[str, Any]]:
    """The part of metrics.jsonl that must be equal in each run."""
    path = folder / "metrics.jsonl"
    lines = list(read_metrics(path)) if path.exists() else []
    kept = [{key: line[key] for key in RECORDED if key in line} for line in lines]
    return [line for line in kept if len(line) > 1]  # memory is measured anew in each life


def newest_whole(folder: Path) -> int | None:
    """The newest step with a checkpoint. Asserts that each is whole, to the byte."""
    steps = []
    for checkpoint in (folder / "checkpoints").glob("step-*"):
        if checkpoint.suffix in (".tmp", ".gone"):
            continue
        listed = json.loads((checkpoint / "files.json").read_text())["files"]
        found = {
            path.relative_to(checkpoint).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in checkpoint.rglob("*")
            if path.is_file() and path.name != "files.json"
        }
        assert found == {file["path"]: file["sha256"] for file in listed}, checkpoint
        steps.append(int(checkpoint.name.removeprefix("step-")))
    return max(steps, default=None)


@dataclass
class Story:
    """One command that is started and killed many times."""

    cluster: Cluster
    undisturbed: Path
    random: random.Random
    start_s: float
    hit: list[tuple[str, str, int]] = field(default_factory=list)
    victims: list[str] = field(default_factory=list)

    @property
    def folder(self) -> Path:
        return self.cluster.output()

    def live(self, aim: str) -> bool:
        """Kills the command at a random moment of `aim`. Returns whether it was killed."""
        clear(self.folder / "logs")
        newest = newest_whole(self.folder)
        process = self.cluster.start("train", "tiny.yaml", "--processes", "2")
        self.victims = self.victims or self.random.sample(VICTIMS, len(VICTIMS))
        victim = self.victims.pop()
        killed = self._wait_for(aim, process) and self._kill(process, victim)
        out, err = process.communicate(timeout=120)
        assert "is passed over" not in out, out
        assert "Traceback" not in err, err
        phase = str((read_pulse(self.folder / "logs", 0) or {"phase": "start"})["phase"])
        resumed = [int(step) for step in re.findall(r"resumed from step-(\d+)", out)]
        if resumed or phase not in (START, LOAD):
            assert resumed == ([newest] if newest is not None else []), out
        if not killed:
            assert process.returncode == 0, (out, err)
            return False
        # A rank may have ended before the kill: then no process noticed it.
        expected = (5, 0) if victim.startswith("rank") else (-signal.SIGKILL,)
        assert process.returncode in expected, (victim, process.returncode, out, err)
        self._wait_for_all_to_be_gone()
        so_far = recorded(self.folder)
        self.hit.append((phase, victim, so_far[-1]["step"] if so_far else 0))
        assert so_far == recorded(self.undisturbed)[: len(so_far)]
        return True

    def _wait_for(self, aim: str, process: subprocess.Popen[str]) -> bool:
        """Waits until a random moment of `aim`. False if the run ended before."""
        choose = self.random.uniform
        if aim == "start":
            return self._sleep(choose(0, self.start_s), process)
        times = 1 if aim == "export" else self.random.randint(1, 3)
        before = len(recorded(self.folder))
        phases = self._phases(process)
        for phase in phases:
            times -= phase == aim
            if times <= 0 and (aim != "train" or len(recorded(self.folder)) != before):
                return self._sleep(
                    choose(0, {"train": 0.1, "save": 0.1, "export": 0.05}[aim]), process
                )
        return False

    def _phases(self, process: subprocess.Popen[str]) -> Iterator[str]:
        """Yields the phase of rank 0 whenever it changes, until the run ends."""
        last = ""
        while process.poll() is None:
            phase = str((read_pulse(self.folder / "logs", 0) or {}).get("phase", ""))
            if phase != last:
                last = phase
                yield phase
            time.sleep(0.001)

    @staticmethod
    def _sleep(seconds: float, process: subprocess.Popen[str]) -> bool:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.001)
        return process.poll() is None

    @staticmethod
    def _kill(process: subprocess.Popen[str], victim: str) -> bool:
        ranks = rank_pids(process.pid)
        chosen = {"everything": [process.pid, *ranks], "launcher": [process.pid]}.get(victim)
        if chosen is None:
            chosen = ranks[int(victim[-1]) :][:1]
        for pid in chosen:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        return bool(chosen)

    def _wait_for_all_to_be_gone(self) -> None:
        """The ranks die with their launcher, so the command may be started again at once."""
        deadline = time.monotonic() + 120
        while left := [pid for pid in _processes_in(self.cluster.folder) if pid != os.getpid()]:
            assert time.monotonic() < deadline, left
            time.sleep(0.02)


def _processes_in(folder: Path) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and (entry / "cwd").readlink() == folder:
                found.append(int(entry.name))
        except OSError:
            continue
    return found


@pytest.mark.parametrize("engine", ENGINES)
def test_a_run_killed_at_any_moment_resumes_as_if_never_killed(
    tmp_path: Path, bundle: Path, engine: str
) -> None:
    checkpoint = {"every": 2, "keep": 2, "best": True}
    changes = {
        "engine": ENGINES[engine],
        "steps": STEPS,
        "checkpoint": checkpoint,
        "evaluation": {"every": 3},
    }
    killed_again_and_again(tmp_path, bundle, changes)


def killed_again_and_again(folder: Path, bundle: Path, changes: dict[str, Any]) -> None:
    """Kills a run in each of the wanted phases, and compares."""
    seed = int(os.environ.get("AIRLIFT_KILL_SEED", secrets.randbits(32)))
    alone = Cluster(folder / "alone", bundle)
    alone.folder.mkdir()
    alone.write(**changes)
    began = time.time()
    undisturbed = alone.trained()
    first = (undisturbed / "tensorboard").stat().st_ctime - began

    cluster = Cluster(folder / "killed", bundle)
    cluster.folder.mkdir()
    cluster.write(**changes)
    story = Story(cluster, undisturbed, random.Random(seed), first)
    aims = list(AIMS)
    story.random.shuffle(aims)
    lives = 0
    while aims or story.folder.exists():
        lives += 1
        assert lives < MOST_LIVES, (seed, story.hit, aims)
        if story.live(aims[0] if aims else "nothing"):
            if story.hit[-1][0] in aims:
                aims.remove(story.hit[-1][0])
            continue
        assert_same_story(story.folder, undisturbed)
        kept = {path.name for path in (undisturbed / "checkpoints").iterdir()}
        assert {path.name for path in (story.folder / "checkpoints").iterdir()} == kept
        assert not list(story.folder.glob("*.tmp"))
        shutil.rmtree(story.folder)
        shutil.rmtree(story.folder.parent / ".stores")
    assert len(story.hit) >= len(AIMS)
