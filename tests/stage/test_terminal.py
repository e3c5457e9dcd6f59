"""What a person sees: colours that mean something, and whole words. A pipe gets plain text."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from stage.terminal import coloured
from tests.support.terminal import in_terminal

ROOT = Path(__file__).resolve().parents[2]
ERROR = (
    "error: my.yaml:18: `prompts`: its header has no comma, and would be one column.\n"
    "  -> Where the bundle was made: stage patch BUNDLE --report damage.json -o PATCH. "
    "Or look at /home/me/.local/state/airlift/receipts/4f1c.damage.json"
)
RED, GREEN, YELLOW, CYAN, BOLD, END = (f"\033[{n}m" for n in ("1;31", "32", "33", "36", "1", "0"))


def test_colours_say_what_is_wrong_sound_a_command_or_a_path() -> None:
    text = coloured(ERROR)
    assert text.startswith(f"{RED}error:{END} {BOLD}my.yaml:18{END}: {CYAN}`prompts`{END}")
    assert f"{CYAN}stage patch BUNDLE --report damage.json -o PATCH{END}." in text
    assert text.endswith(f"{BOLD}/home/me/.local/state/airlift/receipts/4f1c.damage.json{END}")
    assert f"bundle: {GREEN}sound{END}: 3 files" in coloured("bundle: sound: 3 files")
    assert coloured("warning: slow").startswith(f"{YELLOW}warning:{END}")
    plain = "step 1/120  epoch 0.02  loss 10.8503  lr 5.83e-05  234 tokens/s"
    assert coloured(plain) == plain


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


@pytest.mark.parametrize(
    ("environ", "has_colour"),
    [({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False), ({"FORCE_COLOR": "0"}, False),
     ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, False), ({"TERM": "dumb", "FORCE_COLOR": "1"}, True)],
)  # fmt: skip
def test_a_terminal_without_colours_gets_none(environ: dict[str, str], has_colour: bool) -> None:
    assert ("\033" in on_terminal(*MISTAKE, **environ)) == has_colour
