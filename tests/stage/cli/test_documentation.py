"""docs/ knows every exit code, every key, and no option that is not there.

`reference/commands.md` is made of the commands themselves: tests/test_docs.py.
"""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

import runner.cli
import stage.cli

ROOT = Path(__file__).resolve().parents[3]
PAGES = [
    ROOT / "README.md",
    *(p for p in sorted((ROOT / "docs").rglob("*.md")) if "adr" not in p.parts),
]


def options(program: str, words: list[str]) -> tuple[str, set[str]] | None:
    """The command that a line begins with, and its options; None for words that are no command."""
    command: click.Command = {"stage": stage.cli.main, "runner": runner.cli.main}[program]
    name = program
    while isinstance(command, click.Group) and words:
        inner = command.get_command(click.Context(command), words.pop(0))
        if inner is None:
            return None
        command, name = inner, f"{name} {inner.name}"
    return name, {
        option for one in command.params for option in [*one.opts, *one.secondary_opts]
    } | {"--help", "-h"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_no_page_calls_a_command_with_an_option_that_it_does_not_have(page: Path) -> None:
    if page.name == "CHANGELOG.md":
        return
    wrong = []
    for line in re.findall(
        r"`((?:stage|runner) [^`\n]+)`|^ {4}(.+)$", page.read_text("utf-8"), re.M
    ):
        for call in re.findall(r"(?:^|\s)(stage|runner) ([a-z][^|&;#]*)", " ".join(line)):
            words = call[1].partition(" -- ")[0].split()
            known = options(call[0], list(words))
            used = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
            if known and not used <= known[1]:
                wrong.append(f"{known[0]}: {sorted(used - known[1])}")
    assert wrong == []
