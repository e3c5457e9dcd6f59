"""Work that processes share is done once, reported in full, and ended in time."""

from __future__ import annotations

import errno
import os
import signal
import time
from pathlib import Path

import pytest

from stage.errors import IncompleteError
from stage.processes import MOST_PIECES, Send, Workers


@pytest.mark.parametrize("processes", [1, 2, 5])
@pytest.mark.parametrize("count", [0, 1, 3, MOST_PIECES])
def test_each_piece_is_done_once(processes: int, count: int) -> None:
    def work(number: int, send: Send) -> None:
        send(["did", number])

    with Workers(work, count, processes) as workers:
        assert sorted(workers.messages()) == [["did", number] for number in range(count)]


def test_pieces_go_to_whoever_is_free(tmp_path: Path) -> None:
    """The first worker waits for all other pieces, so these must not be assigned in advance."""

    def work(number: int, send: Send) -> None:
        (tmp_path / str(number)).touch()
        while number == 0 and len(list(tmp_path.iterdir())) < 20:
            time.sleep(0.001)
        send(["by", os.getpid()])

    with Workers(work, 20, 2) as workers:
        by = [pid for _, pid in workers.messages()]
    assert len(by) == 20 and len(set(by)) == 2 and os.getpid() not in by


def test_a_worker_that_is_ended_from_outside_is_no_verdict() -> None:
    def work(number: int, send: Send) -> None:
        if number == 3:
            os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does where memory is short

    with (
        Workers(work, 8, 2) as workers,
        pytest.raises(IncompleteError, match="ended before its work was done") as caught,
    ):
        list(workers.messages())
    assert caught.value.exit_code == 5


@pytest.mark.parametrize("allowed", [0, 1])
def test_where_no_more_processes_are_allowed_fewer_do_it_all(
    allowed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `ulimit -u` on a login node. Root, who may run these tests, has no such limit."""
    fork, forked = os.fork, []

    def limited() -> int:
        if len(forked) == allowed:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        forked.append(1)
        return fork()

    def work(number: int, send: Send) -> None:
        send([number])

    monkeypatch.setattr(os, "fork", limited)
    with Workers(work, 9, 4) as workers:
        assert sorted(workers.messages()) == [[number] for number in range(9)]


def test_leaving_ends_the_work(tmp_path: Path) -> None:
    """As after Ctrl-C, or a lock that is found invalid while its files are being read."""

    def work(number: int, send: Send) -> None:
        (tmp_path / str(os.getpid())).touch()
        time.sleep(60)

    with Workers(work, 8, 2):
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.001)
    for child in tmp_path.iterdir():
        with pytest.raises(ProcessLookupError):
            os.kill(int(child.name), 0)


def test_a_ctrl_c_that_was_ignored_stays_ignored_in_the_workers() -> None:
    """`stage verify &` in a script: Ctrl-C reaches its group, and must not end the workers."""

    def work(number: int, send: Send) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        send([number])

    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Workers(work, 3, 2) as workers:
            assert sorted(workers.messages()) == [[0], [1], [2]]
    finally:
        signal.signal(signal.SIGINT, before)
