"""Waiting for a state, never for a time; and a port that nobody has."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Callable
from typing import Any


def wait_for(condition: Callable[[], Any], process: subprocess.Popen[str] | None = None) -> None:
    """Returns once the condition holds; a process that is given must not end before."""
    deadline = time.monotonic() + 180
    while not condition():
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def free_port() -> str:
    """A port of loopback where nobody listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])
