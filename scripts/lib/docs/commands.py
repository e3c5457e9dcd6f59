"""The commands of `stage` and `runner`, from click: usage, summary and options."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

import click

import runner.cli
import stage.cli


def of_stage() -> str:
    """All commands of `stage`."""
    return "\n\n".join(_commands(stage.cli.main, click.Context(stage.cli.main, info_name="stage")))


def of_runner() -> str:
    """All commands of `runner`."""
    main = runner.cli.main
    return "\n\n".join(_commands(main, click.Context(main, info_name="runner")))


def _commands(group: click.Group, context: click.Context) -> Iterator[str]:
    for name in sorted(group.list_commands(context)):
        command = group.get_command(context, name)
        assert command is not None
        if command.hidden:
            continue
        inner = click.Context(command, info_name=name, parent=context)
        if isinstance(command, click.Group):
            yield from _commands(command, inner)
        else:
            yield _section(command, inner)


def _section(command: click.Command, context: click.Context) -> str:
    usage = " ".join(command.collect_usage_pieces(context))
    rows = [_row(option, context) for option in command.params if isinstance(option, click.Option)]
    return "\n".join(
        [
            f"## {context.command_path}",
            "",
            f"    {context.command_path} {usage}",
            "",
            _prose(command.help or ""),
            "",
            "| option | meaning |",
            "|---|---|",
            *sorted(rows),
            "| `-h`, `--help` | Prints the help of the command. |",
        ]
    )


def _row(option: click.Option, context: click.Context) -> str:
    names = sorted([*option.opts, *option.secondary_opts], key=lambda name: (len(name) > 2, name))
    value = "" if option.is_flag else f" {option.make_metavar(context)}".replace("|", " or ")
    shown = ", ".join(f"`{name}{value if name.startswith('--') else ''}`" for name in names)
    note = " Required." if option.required else ""
    text = plain(option.help or "")
    return f"| {shown} | {text}{note} |"


def _prose(text: str) -> str:
    """The paragraphs of a help text; those that click does not wrap are code."""
    paragraphs = inspect.cleandoc(text.partition("\f")[0]).split("\n\n")
    return "\n\n".join(
        "\n".join(f"    {line}" for line in paragraph.splitlines()[1:])
        if paragraph.startswith("\b")
        else plain(" ".join(paragraph.split()))
        for paragraph in paragraphs
    )


def plain(text: str) -> str:
    """A text that Markdown shows as it is written, outside of code."""
    parts = re.split(r"(`[^`]*`)", text)
    if text.count("`") % 2:
        return text.replace("`", "\\`")
    return "".join(
        part.replace("|", "\\|") if part.startswith("`") else _escaped(part) for part in parts
    )


def _escaped(text: str) -> str:
    return re.sub(r"([*_|\[\]\\])", r"\\\1", text).replace("<", "&lt;").replace(">", "&gt;")
