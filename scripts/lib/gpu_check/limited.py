"""A command with a limit of seconds, which ends with all its processes."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path


def run_limited(
    command: list[str], log: Path, limit_s: float, *, cwd: Path, environ: Mapping[str, str]
) -> int | None:
    """Runs a command.

    Args:
        command: its words.
        log: takes its output.
        limit_s: after so many seconds it is killed, with the processes that it started: they would
            hold the GPUs while the next item measures.
        cwd: its folder.
        environ: its variables.

    Returns:
        Its exit code; None: it was killed.
    """
    with open(log, "wb") as output:
        process = subprocess.Popen(
            command, cwd=cwd, env=dict(environ), stdin=subprocess.DEVNULL, stdout=output,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        # Also after Ctrl-C: a session of its own gets no signal of the terminal.
        if process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
