"""Ranks here are real processes that beat, stop and fail; only the detector's clock is faked."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.from_stage import UsageError
from runner.job.shapes import Device
from runner.launch import watch
from runner.launch.ranks import Start
from runner.launch.supervise import start_ranks
from runner.launch.watch import HangDetector
from runner.run_folder import heartbeat
from runner.run_folder.heartbeat import Heartbeat, read_failure, read_failures, read_pulse
from runner.run_folder.layout import RunFolder
from runner.training.components.process_group import RankFacts, check_facts, weakest
from tests.support.waiting import wait_for

RANK = """\
import os, signal, sys, time
from pathlib import Path
from runner.run_folder.heartbeat import Heartbeat as Vitals
rank = int(os.environ['RANK'])
vitals = Vitals(Path(sys.argv[1]) / 'logs', rank)
def wait_in_a_collective():
    time.sleep(60)
"""


def run(script: str, processes: int, folder: Path, hang_after_s: float | None = None) -> int:
    argv = [sys.executable, "-c", RANK + script, str(folder)]
    return start_ranks(
        argv, Start(processes), RunFolder(folder), os.environ, hang_after_s=hang_after_s
    ).exit_code


def detector(logs: Path, ranks: int) -> tuple[HangDetector, list[float]]:
    """A detector, and its clock."""
    now = [0.0]
    return HangDetector(logs, ranks, 1.0, clock=lambda: now[0]), now


READS = 'Current thread 0x1 (most recent call first):\n  File "/x/data.py", line 9 in read\n'
WAITS = """\
Thread 0x2 (most recent call first):
  File "/x/threading.py", line 3 in wait

Current thread 0x1 (most recent call first):
  File "/x/loop.py", line 7 in barrier
  File "/x/main.py", line 1 in <module>
"""


def test_ranks_that_hang_before_their_first_pulse_are_found_in_the_end(tmp_path: Path) -> None:
    """A dead disk stops Python itself."""
    eye, now = detector(tmp_path, 5)
    now[0] = watch.SLOW_SILENT_S
    assert not eye.hung_ranks()
    now[0] += 10
    assert eye.hung_ranks() == dict.fromkeys(range(5), watch.SLOW_SILENT_S + 10)
    for rank, stacks in {0: WAITS, 1: WAITS, 2: READS, 3: WAITS}.items():
        heartbeat.stacks_path(tmp_path, rank).write_text(stacks)
    first, *rest = eye.report_hang({0: 12.4, 2: 30.0})
    assert first.startswith("ranks 0, 2 gave no sign of life for 30 s: a hang.")
    assert rest == [
        "rank 2 (start):",
        "    read (/x/data.py:9)",
        "rank 4 (start): does not answer (stopped? node gone?)",
        "ranks 0-1, 3 (start):",
        "    barrier (/x/loop.py:7)",
        "    <module> (/x/main.py:1)",
        f"whole stacks: {tmp_path}/rank-*.stacks",
    ]


# Between import and the first step: slow work of several kinds, and a thread that waits for ever.
WORK = {
    "computes": ("while True: sum(range(10_000))", True),
    "reads": ("while True: open('/proc/self/maps').read(); time.sleep(0.05)", True),
    "waits for a lock": ("import threading; threading.Semaphore(0).acquire()", False),
}


@pytest.mark.parametrize("name", WORK)
def test_a_slow_start_beats_as_long_as_it_works_and_one_that_hangs_does_not(
    tmp_path: Path, name: str
) -> None:
    code, beats = WORK[name]
    start = f"vitals.beat('load'); print('started', flush=True)\n{code}"
    rank = [sys.executable, "-c", RANK + start, str(tmp_path)]
    with subprocess.Popen(rank, env=os.environ | {"RANK": "0"}, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            first = read_pulse(tmp_path / "logs", 0)
            deadline = time.monotonic() + (120 if beats else 3)
            while read_pulse(tmp_path / "logs", 0) == first and time.monotonic() < deadline:
                time.sleep(0.1)
            assert (read_pulse(tmp_path / "logs", 0) != first) is beats
        finally:
            process.kill()


def test_who_has_ended_long_work_beats_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a rank that hangs later would beat for ever."""
    monkeypatch.setattr(heartbeat, "PULSE_EVERY_S", 0.01)
    vitals = Heartbeat(tmp_path, 0)

    def is_still() -> bool:
        before = read_pulse(tmp_path, 0)
        time.sleep(0.2)
        return read_pulse(tmp_path, 0) == before

    with vitals.beating("train"):
        wait_for(lambda: not is_still())
    wait_for(is_still)


@pytest.mark.parametrize(("other", "hangs"), [("load", False), ("join", True), ("train", True)])
def test_a_rank_that_waits_for_the_slow_start_of_another_does_not_hang(
    tmp_path: Path, other: str, hangs: bool
) -> None:
    """Ranks that only join beat as well, and no rank waits for another one's step."""
    eye, now = detector(tmp_path, 2)
    (tmp_path / "rank-1.pulse").write_text('{"count": 1, "phase": "load"}')
    for count in range(6):
        (tmp_path / "rank-0.pulse").write_text(f'{{"count": {count}, "phase": "{other}"}}')
        found = eye.hung_ranks()
        now[0] += watch.SLOW_SILENT_S / 2
    assert (1 in found) is hangs


def test_torchs_last_collectives_of_a_hang_are_in_logs(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """torch itself writes them only when a collective times out, which takes half an hour."""
    joined = """
import torch.distributed as dist
from runner.launch.ranks import RankInfo
from runner.launch.ranks import Rank
from runner.training.components.process_group import meet, open_store
me = Rank(RankInfo.of(os.environ), vitals)
ranks = meet(me, open_store(me), 'ddp', 'cpu')
ranks.total(1.0)
vitals.beat('train')
if rank == 1: wait_in_a_collective()
ranks.barrier()
"""
    assert run(joined, 2, tmp_path, hang_after_s=2.0) == 5
    said = capfd.readouterr().err
    written = [pickle.loads((tmp_path / f"logs/flight-rank-{n}").read_bytes()) for n in range(2)]
    assert [set(one) >= {"version", "pg_config"} for one in written] == [True, True]
    assert f"for torchfrtrace: {tmp_path / 'logs' / 'flight-rank-'}*" in said


@given(st.lists(st.integers(1, 200), min_size=1, max_size=20))  # sums of floats would be off
def test_no_step_as_long_as_those_before_it_is_a_hang(
    tmp_path_factory: pytest.TempPathFactory, steps: list[int]
) -> None:
    logs, now = tmp_path_factory.mktemp("logs"), [0.0]
    eye = HangDetector(logs, 1, clock=lambda: now[0])
    vitals = Heartbeat(logs, 0)
    for number, step in enumerate(steps):
        vitals.beat(f"train {number}")  # a new phase each time, so that none waits for its second
        now[0] += watch.LOOK_EVERY_S
        assert not eye.hung_ranks()
        now[0] += step
        assert not eye.hung_ranks()
    limit = max(watch.SILENT_S, 10 * (max([0.0, *steps[:-1]]) + watch.LOOK_EVERY_S))
    now[0] += limit - steps[-1] - 1
    assert not eye.hung_ranks()
    now[0] += 2 * watch.LOOK_EVERY_S
    assert set(eye.hung_ranks()) == {0}


def test_a_checkpoint_may_take_longer_than_a_step(tmp_path: Path) -> None:
    now = [0.0]
    eye = HangDetector(tmp_path, 1, 10.0, clock=lambda: now[0])
    vitals = Heartbeat(tmp_path, 0)
    for phase, hangs in (("save", False), ("train", True)):
        vitals.beat(phase)
        now[0] += watch.LOOK_EVERY_S
        assert not eye.hung_ranks()
        now[0] += 60
        assert bool(eye.hung_ranks()) is hangs


def test_a_torn_pulse_or_failure_is_no_sign_and_no_crash(tmp_path: Path) -> None:
    (tmp_path / "rank-0.pulse").write_text('{"count": 1, "ph')
    (tmp_path / "rank-0.failure").write_text('{"rank": 0}')
    assert (read_pulse(tmp_path, 0), read_failure(tmp_path, 0)) == (None, None)
    assert read_failures(tmp_path) == []


def test_what_an_earlier_run_left_is_not_told_again(tmp_path: Path) -> None:
    for rank, code in enumerate((5, 1, 1)):
        Heartbeat(tmp_path, rank).fail("of yesterday", code, consequence=code == 5)
    Heartbeat(tmp_path, 2)  # its next start
    assert [failure.rank for failure in read_failures(tmp_path)] == [1, 0], "the cause first"
    HangDetector(tmp_path, 1)
    assert read_failures(tmp_path) == []


A800 = Device("cuda", "A800", 80 * 2**30, True, True)


SAME = RankFacts(device=A800, host="n1", gpu="", bundle="ab")
OLDER = replace(SAME, device=Device("cuda", "V100", 32 * 2**30, False, True, 9))
GPUS = [RankFacts(device=A800, host=host, gpu=gpu) for host in ("n1", "n2") for gpu in "ab"]


@pytest.mark.parametrize(
    ("facts", "said", "remedy"),
    [
        (
            [SAME, SAME, replace(SAME, device=Device.cpu(2**30), host="n2")],
            r"kinds: A800 and CPU \(rank 0 on n1, rank 2 on n2\)",
            "Ask Slurm for nodes of one kind",
        ),
        (
            [SAME, replace(SAME, bundle=""), replace(SAME, host="n2", bundle="cd")],
            r"tag manifest ab and cd \(rank 0 on n1, rank 2 on n2\)",
            "Give all nodes the same bundle",
        ),
        # NCCL would only print "invalid usage".
        (
            [*GPUS, GPUS[0]],
            r"ranks 0 and 4 would share a GPU of n1 \(A800\); its ranks see 2 in all",
            "One rank per GPU: --processes 2",
        ),
    ],
)
def test_ranks_that_do_not_fit_together_are_refused(
    facts: list[RankFacts], said: str, remedy: str
) -> None:
    with pytest.raises(UsageError, match=said) as refused:
        check_facts(facts)
    assert remedy in refused.value.remedy


def test_ranks_with_gpus_of_several_kinds_do_what_each_can() -> None:
    for facts in ([SAME, replace(SAME, bundle="")], [OLDER, SAME], GPUS):
        check_facts(facts)  # each node has its own GPUs, whatever their numbers
    expected = Device("cuda", "A800 and V100", 32 * 2**30, False, True, 0)
    assert weakest([OLDER, SAME, SAME]) == weakest([SAME, OLDER]) == expected
