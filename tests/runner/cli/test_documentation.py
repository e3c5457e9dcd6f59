"""docs/reference/runner/README.md knows every command and option of `runner`, and no other."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from runner.cli import main

TEXT = (Path(__file__).resolve().parents[3] / "docs/reference/runner/README.md").read_text(
    encoding="utf-8"
)
COMMANDS = {name: one for name, one in main.commands.items() if not one.hidden}


def options_of(command: click.Command) -> set[str]:
    return {
        name for parameter in command.params for name in parameter.opts if name.startswith("--")
    }


def synopsis_of(name: str) -> str:
    line = re.search(rf"^    runner {name} .*(\n {{8,}}.*)*", TEXT, re.MULTILINE)
    assert line, f"docs/reference/runner/README.md does not show how `runner {name}` is called"
    return line[0]


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_is_shown_with_just_its_options(name: str) -> None:
    shown = set(re.findall(r"--[a-z][\w-]*", synopsis_of(name).partition(" -- ")[0]))
    assert shown == {option for option in options_of(COMMANDS[name]) if option != "--help"}


def test_every_option_is_explained() -> None:
    explained = set(re.findall(r"^\| `(--[\w-]+)`", TEXT, re.MULTILINE))
    assert {option for command in COMMANDS.values() for option in options_of(command)} <= explained
