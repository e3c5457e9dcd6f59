"""A command on a terminal of its own, as a person sees it."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import termios
from pathlib import Path


def in_terminal(
    columns: int,
    *command: str | Path,
    code: int = 0,
    asked: str = "",
    typed: str = "",
    **environment: str,
) -> str:
    """What a terminal of that width shows of a command: stdout and stderr.

    Args:
        typed: what is typed when the command has shown `asked`.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    left = ("NO_COLOR", "FORCE_COLOR", "COLUMNS")  # xdist sets the last in its workers
    kept = {name: value for name, value in os.environ.items() if name not in left}
    process = subprocess.Popen(
        command,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**kept, "TERM": "xterm", **environment},
        start_new_session=True,
    )
    os.close(theirs)
    told = b""
    try:
        while data := os.read(ours, 65536):
            told += data
            if asked and asked in told.decode():
                os.write(ours, typed.encode())
                asked = ""
    except OSError:  # the other side is closed: Linux says EIO
        pass
    os.close(ours)
    assert process.wait(60) == code, told
    return told.decode().replace("\r\n", "\n")
