"""What a person sees: colours that mean something, and whole words."""

from __future__ import annotations

import re
import sys

from tests.support.terminal import in_terminal

LONG = "a-folder/with-a-long-name/that-is/not-there"


def test_a_terminal_gets_colours_and_lines_of_its_width() -> None:
    shown = in_terminal(60, sys.executable, "-m", "stage", "verify", LONG, code=2)
    assert shown.startswith("\033[1;31merror:\033[0m")
    plain = re.sub(r"\033\[[\d;]*m", "", shown).splitlines()
    assert LONG in " ".join(plain) and len(plain) > 2
    assert all(len(line) <= 60 for line in plain)
