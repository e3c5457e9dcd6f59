"""Work in threads: results in order, the first failure wins, and Ctrl-C waits for nobody."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from stage.util.threads import Stopped, together


def test_results_are_in_the_order_of_the_things() -> None:
    slowest_first = (0.05, 0.02, 0.0)
    assert together(lambda s: (time.sleep(s), s)[1], slowest_first, 3) == list(slowest_first)
    assert together(str, [], 3) == []


def test_the_first_failure_ends_the_others_and_is_the_one_that_is_raised() -> None:
    ended, begun = threading.Event(), []

    def work(thing: int) -> None:
        begun.append(thing)
        if thing == 1:
            raise OSError("the first failure")
        assert ended.wait(20)
        raise Stopped

    with pytest.raises(OSError, match="the first failure"):
        together(work, range(100), 2, ended.set)
    assert len(begun) < 10


def test_work_that_was_stopped_from_outside_did_not_succeed() -> None:
    def work(thing: int) -> None:
        raise Stopped

    with pytest.raises(KeyboardInterrupt):
        together(work, [1], 1)


@pytest.mark.parametrize("seconds", [0, 0.1], ids=["at once", "later"])
def test_ctrl_c_does_not_wait_for_a_server_that_never_answers(seconds: float) -> None:
    answer, stopped = threading.Event(), threading.Event()

    def work(thing: int) -> None:
        time.sleep(seconds)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        answer.wait(8)

    began = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            together(work, [1], 1, stopped.set)
        assert time.monotonic() - began < 4
        assert stopped.is_set()
    finally:
        answer.set()
