"""What a person sees: colours that mean something, and whole words. A pipe gets plain text."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.support.terminal import in_terminal

ROOT = Path(__file__).resolve().parents[2]
RED, END = "\033[1;31m", "\033[0m"


def in_pipe(*command: str, **environ: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *command],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "TERM": "xterm", **environ},
    )
    return done.stdout + done.stderr


MISTAKE = ("stage", "verify", "a-folder/with-a-long-name/that-is/not-there")


def on_terminal(*command: str, **environ: str) -> str:
    """What a terminal shows of a mistake."""
    return in_terminal(60, sys.executable, "-m", *command, code=2, **environ)


def test_a_terminal_gets_colours_and_lines_of_its_width() -> None:
    shown = on_terminal(*MISTAKE)
    assert shown.startswith(f"{RED}error:{END}")
    plain = re.sub(r"\033\[[\d;]*m", "", shown)
    assert "a-folder/with-a-long-name/that-is/not-there" in plain
    assert len(plain.splitlines()) > len(in_pipe(*MISTAKE).splitlines())
    assert all(len(line) <= 60 for line in plain.splitlines())
