"""Work shared out over processes is done once, heard of in full, and ends when it has to."""

from __future__ import annotations

import errno
import os
import signal
import time
from pathlib import Path

import pytest

from stage.errors import IncompleteError
from stage.workers import MOST_PIECES, Send, Workers


@pytest.mark.parametrize("joins", [False, True])
@pytest.mark.parametrize("processes", [1, 2, 5])
@pytest.mark.parametrize("count", [0, 1, 3, MOST_PIECES])
def test_each_piece_is_done_once(processes: int, count: int, joins: bool) -> None:
    def work(number: int, send: Send) -> None:
        send(["did", number])

    with Workers(work, count, processes, joins=joins) as workers:
        assert sorted(workers.messages()) == [["did", number] for number in range(count)]


def test_pieces_go_to_whoever_is_free(tmp_path: Path) -> None:
    """The first worker waits for all the others' pieces: done only if those are not dealt out beforehand."""

    def work(number: int, send: Send) -> None:
        (tmp_path / str(number)).touch()
        while number == 0 and len(list(tmp_path.iterdir())) < 20:
            time.sleep(0.001)
        send(["by", os.getpid()])

    with Workers(work, 20, 2) as workers:
        by = [pid for _, pid in workers.messages()]
    assert len(by) == 20 and len(set(by)) == 2 and os.getpid() not in by


def test_who_joins_is_one_of_them_once_it_listens(tmp_path: Path) -> None:
    """Of two, one other works meanwhile; a piece of its own shows that this one took part."""
    owner = os.getpid()

    def work(number: int, send: Send) -> None:
        if os.getpid() != owner:
            (tmp_path / str(number)).touch()
            while number and not (tmp_path / "owner").exists():
                time.sleep(0.001)
        else:
            (tmp_path / "owner").touch()
        send([os.getpid()])

    with Workers(work, 3, 2, joins=True) as workers:
        while not list(tmp_path.iterdir()):
            time.sleep(0.001)
        by = [pid for (pid,) in workers.messages()]
    assert len(by) == 3 and len(set(by)) == 2 and owner in by


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
def test_where_no_more_processes_are_allowed_fewer_do_it_all(allowed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `ulimit -u` on a login node; root, who may run these tests, knows no such limit."""
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
    """As Ctrl-C does, or a lock that turns out to be none while its files are being read."""

    def work(number: int, send: Send) -> None:
        (tmp_path / str(os.getpid())).touch()
        time.sleep(60)

    with Workers(work, 8, 2):
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.001)
    for child in tmp_path.iterdir():
        with pytest.raises(ProcessLookupError):
            os.kill(int(child.name), 0)
