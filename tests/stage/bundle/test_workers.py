"""Work that processes share is done once, reported in full, and ended in time."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stage.bundle.verifier import MOST_SHARES, CannotVerify, run_in_workers, share_out

sizes_of_files = st.lists(st.integers(0, 100_000) | st.integers(65 * 2**20, 2**36), max_size=40)


MESSAGES = list[list[object]]
Send = Callable[[list[object]], None]


def messages(work: Callable[[int, Send], None], count: int, jobs: int) -> MESSAGES:
    received: MESSAGES = []
    run_in_workers(work, count, jobs, received.append)
    return received


@pytest.mark.parametrize("processes", [1, 2, 5])
@pytest.mark.parametrize("count", [0, 1, 3, 2 * MOST_SHARES])
def test_each_piece_is_done_once(processes: int, count: int) -> None:
    def work(number: int, send: Send) -> None:
        send(["did", number])

    assert sorted(messages(work, count, processes)) == [["did", n] for n in range(count)]


def test_a_worker_that_is_ended_from_outside_is_no_verdict() -> None:
    def work(number: int, send: Send) -> None:
        if number == 3:
            os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does where memory is short

    with pytest.raises(CannotVerify, match="was ended") as caught:
        messages(work, 8, 2)
    assert caught.value.exit_code == 5


def test_leaving_ends_the_work(tmp_path: Path) -> None:
    """As after Ctrl-C, or a lock that is found invalid while its files are being read."""

    def work(number: int, send: Send) -> None:
        (tmp_path / str(os.getpid())).touch()
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.001)
        send([number])
        time.sleep(60)

    def leave(message: list[object]) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_in_workers(work, 8, 2, leave)
    for child in tmp_path.iterdir():
        with pytest.raises(ProcessLookupError):
            os.kill(int(child.name), 0)


@given(sizes_of_files, st.integers(1, 300))
def test_shares_are_all_there_is_to_read_and_no_more(sizes: list[int], jobs: int) -> None:
    sizes = sorted(sizes, reverse=True)
    shared = share_out(sizes, jobs)
    assert list(itertools.chain(*shared)) == list(range(len(sizes)))
    assert all(shared) and len(shared) <= 2048
    # A share ends with the file that fills it.
    costs = [sum(sizes[place] for place in share[:-1]) for share in shared]
    assert not costs or max(costs) <= max(2**23, sum(sizes) // 32 + 2**21)
