"""docs/reference/stage/ knows every command, option, exit code and key, and no other."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from stage.cli import main

ROOT = Path(__file__).resolve().parents[3]


def commands() -> dict[str, click.Command]:
    """Every command by what is typed after `stage`; those of a group as `env lock`."""
    found: dict[str, click.Command] = {}
    context = click.Context(main)
    for name in main.list_commands(context):
        command = main.get_command(context, name)
        assert command is not None
        found[name] = command
        if isinstance(command, click.Group):
            found |= {
                f"{name} {inner}": inner_command
                for inner, inner_command in command.commands.items()
            }
    return found


def test_what_completion_needs_is_documented() -> None:
    assert 'eval "$(_STAGE_COMPLETE=bash_source stage)"' in documentation()
    assert 'eval "$(_RUNNER_COMPLETE=bash_source runner)"' in documentation()


def documentation() -> str:
    texts = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return "\n".join(path.read_text(encoding="utf-8") for path in texts)


def command_pages() -> str:
    pages = sorted((ROOT / "docs/reference/stage").glob("*.md"))
    return "\n".join(path.read_text(encoding="utf-8") for path in pages)


@pytest.mark.parametrize("name", sorted(commands()))
def test_every_command_and_option_is_documented(name: str) -> None:
    text = command_pages()
    section = re.search(rf"^## `stage {name}.*?(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert section, f"docs/reference/stage/ has no section on `stage {name}`"
    options = {
        option
        for parameter in commands()[name].params
        for option in parameter.opts
        if option.startswith("-")
    }
    assert [
        option
        for option in sorted(options)
        if not re.search(rf"(?<![\w-]){option}(?![\w-])", section[0])
    ] == []


def test_no_option_is_documented_that_is_not_there() -> None:
    text = command_pages()
    for name, section in re.findall(
        r"^## `stage (env \w+|\w+)(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL
    ):
        rows = set(re.findall(r"^\| `(-{1,2}[\w-]+)", section, re.MULTILINE))
        real = {option for parameter in commands()[name].params for option in parameter.opts}
        assert rows <= real, f"`stage {name}`"


def test_every_exit_code_and_manifest_key_is_documented() -> None:
    from stage import errors
    from stage.lock.reader import keys_of
    from stage.lock.requests import KINDS

    text = documentation()
    codes = {
        value.exit_code
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, errors.StageError)
    }
    for code in {0, *codes}:
        assert re.search(rf"^\| {code} \|", text, re.MULTILINE), f"exit code {code}"
    keys = {key for kind in KINDS.values() for key in keys_of(kind)} | {
        "format",
        "name",
        "assets",
        "policy",
        "licences",
    }
    assert [key for key in sorted(keys) if f"`{key}" not in text] == []
