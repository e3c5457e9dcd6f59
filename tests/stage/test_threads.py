"""Work in threads: results in order, the first failure wins, and Ctrl-C waits for nobody."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from stage.threads import Stopped, together


def test_work_that_was_stopped_from_outside_did_not_succeed() -> None:
    def work(thing: int) -> None:
        raise Stopped

    with pytest.raises(KeyboardInterrupt):
        together(work, [1], 1)


ENDLESS = r"""
import os, signal, sys, threading
from stage.threads import together

def work(thing):
    if sys.argv[1] == "at once":  # while `together` may still start its threads
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
    os.write(1, b"asked\n")
    threading.Event().wait()

# A shell starts work in the background with SIGINT ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    together(work, [1], 1, lambda: os.write(1, b"stopped\n"))
except KeyboardInterrupt:
    os._exit(130)  # as `stage` does; Python itself would join its threads
"""


@pytest.mark.parametrize("when", ["at once", "later"])
def test_ctrl_c_does_not_wait_for_a_server_that_never_answers(when: str) -> None:
    command = [sys.executable, "-c", ENDLESS, when]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            first = process.stdout.readline()
            if when == "later":
                assert first == "asked\n"
                process.send_signal(signal.SIGINT)
            assert process.wait(120) == 130
            assert "stopped\n" in (first, *process.stdout)
        finally:
            process.kill()
