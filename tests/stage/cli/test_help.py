"""Help and completion: sections, 80 columns, examples that are right."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from runner.cli import main as runner
from stage.cli import main as stage

ROOT = Path(__file__).resolve().parents[3]


def commands(
    group: click.Group, *names: str
) -> Iterator[tuple[tuple[str, ...], click.Command, click.Group]]:
    for name in group.list_commands(click.Context(group)):
        command = group.get_command(click.Context(group), name)
        assert command is not None
        if command.hidden:
            continue
        yield (*names, name), command, group
        if isinstance(command, click.Group):
            yield from commands(command, *names, name)


ALL = {" ".join(names): command for program in ((stage, "stage"), (runner, "runner"))
       for names, command, _ in commands(*program)}  # fmt: skip


def help_of(words: str, width: int = 80) -> str:
    program, *rest = words.split()
    group = stage if program == "stage" else runner
    done = CliRunner().invoke(
        group, [*rest, "--help"], prog_name=program, terminal_width=width, color=False
    )
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.parametrize("words", ["stage", "runner", "stage env", *ALL])
def test_help_fits_80_columns_and_names_no_file_of_the_checkout(words: str) -> None:
    """An installed package has no `docs/`: "Read more: docs/..." could be read by nobody."""
    text = help_of(words)
    assert [line for line in text.splitlines() if len(line) > 80] == []
    assert not re.search(r"(?<![\w/.])docs/", text)


@pytest.mark.parametrize("words", [words for words in ALL if words != "stage env"])
def test_each_help_has_examples_that_its_options_allow(words: str) -> None:
    text = help_of(words)
    found = re.search(r"^  Examples?:\n((?:    .+\n)+)", text, re.MULTILINE)
    assert found, text
    lines = [line.partition("  #")[0].strip() for line in found[1].splitlines()]
    assert any(f"{words} " in f"{line} " for line in lines)
    for line in lines:
        names = [name for name in ALL if f"{name} " in f"{line} "]
        used = {word for word in shlex.split(line.partition(" -- ")[0]) if word.startswith("-")}
        if names:
            command = ALL[max(names, key=len)]
            known = {option for parameter in command.params for option in parameter.opts}
            assert used - known == {"-p"} & used, line


@pytest.mark.parametrize(
    ("words", "headings"),
    [
        ("stage", ["Laptop", "Between", "Cluster", "Both"]),
        ("stage env", ["Laptop", "Cluster"]),
        ("runner", ["Login node", "Job, or one machine", "During and after"]),
    ],
)
def test_commands_are_in_sections_with_summaries_on_one_line(
    words: str, headings: list[str]
) -> None:
    text = help_of(words)
    part = text[text.index("Commands:") :]
    assert re.findall(r"^  (\S.*):$", part, re.MULTILINE) == headings  # so none is in "More"
    rows = re.findall(r"^    (\S+) +(\S.*)$", part, re.MULTILINE)
    depth = len(words.split()) + 1
    assert {name for name, _ in rows} == {
        name.split()[-1]
        for name in ALL
        if name.startswith(f"{words} ") and len(name.split()) == depth
    }
    assert [name for name, summary in rows if not summary.endswith(".")] == []


COMPLETE = """
eval "$(_{upper}_COMPLETE=bash_source {program})"
COMP_WORDS=({words})
COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
_{program}_completion {program}
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        (["stage", "pu"], ["push"]),
        (["stage", "verify", "--d"], ["--deep"]),
        (["runner", "pre"], ["prepare"]),
    ],
    ids=" ".join,
)
def test_bash_completes_commands_and_options(words: list[str], completed: list[str]) -> None:
    """As docs/reference/commands.md says to set it up."""
    bash = shutil.which("bash")
    assert bash
    script = COMPLETE.format(upper=words[0].upper(), program=words[0], words=" ".join(words))
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [bash, "-c", script],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PATH": programs},
    )
    assert done.stdout.split() == completed, done.stderr
