"""Ranks here are real processes that beat, stop and fail; only the clock of the arithmetic is made."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner import launch, watch
from runner.errors import UsageError
from runner.training.agreement import Standpoint, check_agreement
from runner.vitals import Vitals, read_failure, read_pulse
from runner.watch import Watch, standing

RANK = """\
import os, signal, sys, time
from pathlib import Path
from runner.vitals import Vitals
rank = int(os.environ['RANK'])
vitals = Vitals(Path(sys.argv[1]) / 'logs', rank)
def wait_in_a_collective():
    time.sleep(60)
"""
STOPPED = """\
vitals.beat('train')
if rank == 1: os.kill(os.getpid(), signal.SIGSTOP)
wait_in_a_collective()
"""
FAILING = """\
while rank != 2 and not (Path(sys.argv[1]) / 'logs/rank-2.failure').exists(): time.sleep(0.01)
vitals.fail(f'Traceback of rank {rank}', 1, consequence=rank != 2)
os._exit(1)
"""


def run(script: str, processes: int, folder: Path, **arguments: float) -> int:
    return launch.run_local([sys.executable, "-c", RANK + script, str(folder)], processes, folder, **arguments)


def test_a_stopped_rank_is_a_hang_told_with_each_ranks_stack_and_ended(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "STACKS_WAIT_S", 2.0)
    began = time.monotonic()
    assert run(STOPPED, 3, tmp_path, hang_after_s=1.0) == 5
    assert time.monotonic() - began < 50
    said = capfd.readouterr().err
    assert "ranks 0-2 gave no sign of life" in said
    assert "rank 1 (train): does not answer" in said
    assert said.count("wait_in_a_collective (<string>:") == 1, "equal stacks are shown once"
    assert "run the same command again" in said


def test_of_sixty_tracebacks_the_first_is_shown_once_and_by_rank(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(FAILING, 3, tmp_path) == 1
    said = capfd.readouterr().err
    assert said.count("Traceback of rank") == 1
    assert "Traceback of rank 2" in said, "those that only lost a rank are not the cause"
    assert "rank 2 on " in said


def test_programs_without_a_pulse_never_hang(tmp_path: Path) -> None:
    clock = iter(range(0, 10**9, 10**6))
    silent = Watch(tmp_path, 2, 1.0, clock=lambda: float(next(clock)))
    assert not any(silent.silent() for _ in range(5))


@given(st.lists(st.floats(1.0, 200.0), min_size=1, max_size=20))
def test_no_step_as_long_as_those_before_it_is_a_hang(
    tmp_path_factory: pytest.TempPathFactory, steps: list[float]
) -> None:
    logs, now = tmp_path_factory.mktemp("logs"), [0.0]
    eye = Watch(logs, 1, clock=lambda: now[0])
    vitals = Vitals(logs, 0)
    for number, step in enumerate(steps):
        vitals.beat(f"train {number}")  # a new phase each time, so that none waits for its second
        now[0] += watch.LOOK_EVERY_S
        assert not eye.silent()
        now[0] += step
        assert not eye.silent()


def test_a_checkpoint_may_take_longer_than_a_step(tmp_path: Path) -> None:
    now = [0.0]
    eye = Watch(tmp_path, 1, 10.0, clock=lambda: now[0])
    vitals = Vitals(tmp_path, 0)
    for phase, hangs in (("save", False), ("train", True)):
        vitals.beat(phase)
        now[0] += watch.LOOK_EVERY_S
        assert not eye.silent()
        now[0] += 60
        assert bool(eye.silent()) is hangs


def test_a_torn_pulse_or_failure_is_no_sign_and_no_crash(tmp_path: Path) -> None:
    (tmp_path / "rank-0.pulse").write_text('{"count": 1, "ph')
    (tmp_path / "rank-0.failure").write_text('{"rank": 0}')
    assert read_pulse(tmp_path, 0) is None
    assert read_failure(tmp_path, 0) is None
    assert Watch(tmp_path / "none", 1).first_failure() is None


def test_what_an_earlier_run_left_is_not_told_again(tmp_path: Path) -> None:
    Vitals(tmp_path, 0).fail("of yesterday", 1, consequence=False)
    assert Watch(tmp_path, 1).report_failure() == []


def test_the_main_thread_is_the_one_that_is_shown() -> None:
    stacks = (
        'Thread 0x1 (most recent call first):\n  File "/x/threading.py", line 3 in run\n\n'
        'Current thread 0x2 (most recent call first):\n  File "/x/loop.py", line 7 in step\n'
        '  File "/x/loop.py", line 5 in run\n'
    )
    assert standing(stacks) == ["step (/x/loop.py:7)", "run (/x/loop.py:5)"]
    assert standing("") == []


def test_ranks_that_would_decide_differently_are_refused_with_both_devices() -> None:
    same = Standpoint(host="n1", device="A800", gpu="", must_agree=(("precision", "bf16"), ("batch.micro", "8")))
    other = Standpoint(host="n2", device="V100", gpu="", must_agree=(("precision", "fp16"), ("batch.micro", "8")))
    check_agreement([same, same])
    with pytest.raises(UsageError, match=r"precision: bf16 on rank 0 \(n1, A800\), fp16 on rank 2 \(n2, V100\)"):
        check_agreement([same, same, other])


def test_two_ranks_on_one_gpu_are_refused_with_the_number_that_can_be() -> None:
    """NCCL would say "invalid usage", and no more. Each node has GPUs of its own, whatever their numbers."""
    ranks = [Standpoint(host=host, device="A800", gpu=gpu, must_agree=()) for host in ("n1", "n2") for gpu in "ab"]
    check_agreement(ranks)
    with pytest.raises(
        UsageError, match=r"ranks 0 and 4 would share a GPU of n1 \(A800\); its ranks see 2 in all"
    ) as e:
        check_agreement([*ranks, ranks[0]])
    assert "--processes 2" in str(e.value)
