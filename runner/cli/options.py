"""The options that several commands of `runner` share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

from runner.errors import UsageError, print_line

BUNDLE_VARIABLE = "AIRLIFT_BUNDLE"


def _find_bundle(context: click.Context, parameter: click.Parameter, given: Path | None) -> Path:
    """The bundle of --bundle, of AIRLIFT_BUNDLE, or ./bundle. Prints a choice that is not given.

    Raises:
        UsageError: there is no `./bundle`, or it is not the only bundle here.
    """

    def note(text: str) -> None:
        if not context.params.get("quiet"):
            print_line(text, err=True)

    if given is not None:
        source = context.get_parameter_source(parameter.name or "")
        if source is not None and source.name == "ENVIRONMENT":
            note(f"bundle: {given} (as {BUNDLE_VARIABLE} says)")
        return given
    if context.resilient_parsing:  # completion
        return Path("bundle")
    from runner.inputs import holds_bundle

    found = sorted(path.name for path in Path().iterdir() if holds_bundle(path))
    if found == ["bundle"]:
        note("bundle: ./bundle (no --bundle; it is the only bundle here)")
        return Path("bundle")
    here = f"the bundles here are {', '.join(found)}" if found else "there is no ./bundle here"
    raise UsageError(
        f"{context.command_path}: no --bundle, and {here}.",
        f"Give it: --bundle {found[0] if found else 'FOLDER'}; "
        f"or set it once: export {BUNDLE_VARIABLE}=FOLDER",
    )


bundle_option = click.option(
    "--bundle",
    type=click.Path(path_type=Path),
    envvar=BUNDLE_VARIABLE,
    show_envvar=True,
    callback=_find_bundle,
    help="The bundle's folder, verified beforehand. Default: ./bundle, if it is the only one here.",
)
set_option = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override a key of the run file, e.g. batch.micro=4.",
)
processes_option = click.option(
    "--processes",
    type=click.IntRange(1),
    help="Ranks on this machine. In a Slurm job srun starts them.",
)


def output_option(help: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The option -o, --output."""
    return click.option(
        "-o", "--output", type=click.Path(path_type=Path), metavar="FOLDER", help=help
    )


def run_options(command: Callable[..., None]) -> Callable[..., None]:
    """RUN and the options of all commands that read it."""
    for option in (
        set_option,
        output_option("The run folder. Default: output/<name>."),
        bundle_option,
        # RUN is optional in `train`, because of --reproduce.
        click.argument(
            "run", type=click.Path(path_type=Path), required=command.__name__ != "train"
        ),
    ):
        command = option(command)
    return command
