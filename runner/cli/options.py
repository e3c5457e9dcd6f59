"""The options that several commands of `runner` share."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from runner.from_stage import StageError, UsageError, print_line, quoted, reading_yaml

BUNDLE_VARIABLE = "AIRLIFT_BUNDLE"


def _look_for_bundle(
    context: click.Context, parameter: click.Parameter, several: tuple[Path, ...]
) -> Path | None:
    """The bundle of --bundle, of AIRLIFT_BUNDLE, or ./bundle; None: there is none.

    It prints a choice that is not given on the command line.

    Raises:
        UsageError: several are given.
    """

    def note(text: str) -> None:
        if not context.params.get("quiet"):
            print_line(text, err=True)

    if len(several) > 1:
        raise UsageError(
            f"{context.command_path}: --bundle is given {len(several)} times, and one is read: "
            f"{', '.join(map(str, several))}.",
            f"Keep one: --bundle {quoted(several[-1])}. One bundle can hold all: list the assets "
            "in one manifest.",
        )
    for given in several:
        source = context.get_parameter_source(parameter.name or "")
        if source is not None and source.name == "ENVIRONMENT":
            note(f"bundle: {given} (as {BUNDLE_VARIABLE} says)")
        return given.expanduser() if str(given).startswith("~/") else given
    if not context.resilient_parsing and _bundles_here() == ["bundle"]:
        note("bundle: ./bundle (no --bundle; it is the only bundle here)")
        return Path("bundle")
    return None


def _find_bundle(
    context: click.Context, parameter: click.Parameter, several: tuple[Path, ...]
) -> Path:
    """The same, where a bundle is needed. The run of a command may need none.

    Raises:
        UsageError: several are given; or none, and `./bundle` is not the only bundle here.
    """
    found = _look_for_bundle(context, parameter, several)
    if found is not None or context.resilient_parsing or context.params.get("to"):
        return found or Path("bundle")  # with --to, it is made here first
    names, run = _bundles_here(), context.params.get("run")
    if not names and run is not None and _needs_no_bundle(run):
        from runner.inputs import NO_BUNDLE

        return NO_BUNDLE
    here = f"the bundles here are {', '.join(names)}" if names else "there is no ./bundle here"
    raise UsageError(
        f"{context.command_path}: no --bundle, and {here}.",
        f"Give it: --bundle {quoted(_its_bundle(run, names) if names else 'FOLDER')}; "
        f"or set it once: export {BUNDLE_VARIABLE}=FOLDER{_way_to_slurm(context, run)}",
    )


def _needs_no_bundle(run: Path) -> bool:
    """Whether a run file has a command, and names nothing of a bundle."""
    from runner.config.command_config import names_a_bundle

    with suppress(StageError), reading_yaml(run) as (data, _):
        return "command" in data and not names_a_bundle(data.keys())
    return False


def _its_bundle(run: Path | None, names: list[str]) -> str:
    """The bundle of the manifest that a run file names, else the first one."""
    from stage.bundle.bundle import Bundle

    with suppress(StageError, OSError):
        with reading_yaml(run or Path()) as (data, _):
            manifest = Path(run or "").parent / str(data.get("manifest"))
        with reading_yaml(manifest) as (data, _):
            wanted = data.get("name", manifest.stem)
        return next((n for n in names if Bundle.open(Path(n)).lock.name == wanted), names[0])
    return names[0]


def _way_to_slurm(context: click.Context, run: Path | None) -> str:
    """What `submit` needs where there is no Slurm."""
    from stage.carry.clusters import to_option

    if context.info_name != "submit" or shutil.which("sbatch"):
        return ""
    to = to_option(run) or "--to CLUSTER"
    return f". There is no Slurm here; onto a cluster: runner submit {quoted(run)} {to}"


def _bundles_here() -> list[str]:
    from stage.bundle.bundle import holds_bundle

    return sorted(path.name for path in Path().iterdir() if holds_bundle(path))


class _Bundles(click.Option):
    """An option that may come twice, so that this can be said; its variable is one path."""

    def value_from_envvar(self, ctx: click.Context) -> tuple[str, ...] | None:
        value = self.resolve_envvar_value(ctx)
        return None if value is None else (value,)


def _bundle_option(callback: Callable[..., Path | None], help: str) -> Callable[..., Any]:
    return click.option(
        "--bundle",
        cls=_Bundles,
        multiple=True,
        type=click.Path(path_type=Path),
        envvar=BUNDLE_VARIABLE,
        show_envvar=True,
        callback=callback,
        help=f"{help} Default: ./bundle, if it is the only one here.",
    )


bundle_option = _bundle_option(_find_bundle, "The bundle's folder, verified beforehand.")
optional_bundle_option = _bundle_option(_look_for_bundle, "The bundle whose assets are used.")
set_option = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override a key of the run file, e.g. batch.micro=4.",
)
include_option = click.option(
    "--include",
    multiple=True,
    metavar="PATTERN",
    help="Of a command: a private file of the project that travels all the same.",
)
processes_option = click.option(
    "--processes",
    type=click.IntRange(1),
    help="Ranks on this machine. In a Slurm job srun starts them.",
)


def with_include(overrides: tuple[str, ...], include: tuple[str, ...]) -> tuple[str, ...]:
    """The `--set` texts with those of --include, which is a key of the run file of a command."""
    return (*overrides, f"include={json.dumps(include)}") if include else overrides


def to_option(help: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The option --to. It is known before the bundle is looked for."""
    return click.option("--to", metavar="CLUSTER", is_eager=True, help=help)


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
        click.argument("run", type=click.Path(path_type=Path)),
    ):
        command = option(command)
    return command
