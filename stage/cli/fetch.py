"""`stage lock` and `stage fetch`: from a manifest to its lock and its bundle."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from stage.cli.base import endpoint_option, quiet_option, say
from stage.errors import quoted
from stage.installation import TO_FETCH, check_libraries
from stage.progress import Reporter

_manifest = click.argument("manifest", type=click.Path(path_type=Path))
_verbose = click.option(
    "-v", "--verbose", is_flag=True, help="Also every retry and every file left out."
)
_allow_pickle = click.option(
    "--allow-pickle",
    is_flag=True,
    help="Take Hub models that have only pickles: converted to safetensors here (needs torch).",
)
_EVERY_ASSET = "*"
_update = click.option(
    "--update",
    multiple=True,
    callback=lambda _context, _option, names: frozenset(names),
    is_flag=False,
    flag_value=_EVERY_ASSET,
    metavar="[ASSET]",
    help="Resolve pinned assets again: one, or all. May be repeated.",
)


class _Updating(click.Command):
    """A command whose `--update` needs no value, even directly before MANIFEST.

    click takes the next argument as the value. An asset's name and a manifest have other forms:
    names have no `/`, and manifests end in .yaml or .yml (`--update=NAME` takes any name).
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        for index, argument in enumerate(args[:-1]):
            if argument == "--":
                break
            if argument == "--update" and (
                "/" in args[index + 1] or args[index + 1].endswith((".yaml", ".yml"))
            ):
                args = [*args[:index], f"--update={_EVERY_ASSET}", *args[index + 1 :]]
        return super().parse_args(ctx, args)


# The options of `lock` and `fetch` that have no parameter are fields of `FetchOptions`, by name.
def _pinning(command: Callable[..., None]) -> Callable[..., None]:
    for option in (endpoint_option, _update, quiet_option, _verbose):
        command = option(command)
    return command


@click.command(cls=_Updating)
@_manifest
@_allow_pickle
@_pinning
def lock(manifest: Path, quiet: bool, verbose: bool, **options: Any) -> None:
    """Resolve MANIFEST to exact commits and files; download nothing.

    The result is MANIFEST's .lock, for git. Assets that are in it already keep their pins.

    \b
    Examples:
      stage lock my.yaml
      stage lock my.yaml --update bert     # resolve this asset again
    """
    check_libraries("stage lock", *TO_FETCH)
    from stage.staging.fetch import lock_manifest
    from stage.staging.sources.source import FetchOptions

    with Reporter(quiet=quiet, verbose=verbose) as reporter:
        lock_manifest(manifest, FetchOptions(**options), reporter)


@click.command(cls=_Updating)
@_manifest
@click.option(
    "-o",
    "--output",
    "bundle",
    required=True,
    type=click.Path(path_type=Path),
    help="The bundle's folder, new or not.",
)
@click.option(
    "--dry-run", is_flag=True, help="Print the plan with sizes; download and write nothing."
)
@click.option(
    "--locked", is_flag=True, help="Follow the .lock exactly; refuse to resolve anything again."
)
@click.option(
    "--jobs",
    type=click.IntRange(1, 64),
    default=8,
    show_default=True,
    help="Files downloaded at once.",
)
@_allow_pickle
@click.option(
    "--offline-check/--no-offline-check",
    default=True,
    show_default=True,
    help="At the end, load the files in a process without network; fail if one does not load.",
)
@_pinning
def fetch(manifest: Path, bundle: Path, quiet: bool, verbose: bool, **options: Any) -> None:
    """Download what MANIFEST asks for into one checksummed folder.

    Follows MANIFEST's .lock, and writes one where there is none. Run it again after an
    interruption: it resumes. Run it again after changing the manifest: it fetches the difference.

    \b
    Examples:
      stage fetch my.yaml -o bundle --dry-run    # the plan, with sizes
      stage fetch my.yaml -o bundle
    """
    check_libraries("stage fetch", *TO_FETCH)
    from stage.staging.fetch import fetch_manifest
    from stage.staging.sources.source import FetchOptions
    from stage.staging.working_folder import store_from

    asked = FetchOptions(store=store_from(os.environ), **options)  # each option by its own name
    with Reporter(quiet=quiet, verbose=verbose) as reporter:
        outcome = fetch_manifest(manifest, bundle, asked, reporter)
    if not outcome.dry_run and not quiet:
        from stage.carry.clusters import to_option
        from stage.serve.trace import traced_command

        say(f"bundle id {outcome.bundle_id}")
        script = traced_command(manifest)
        if (to := to_option(Path.cwd())) and not script:
            say(f"next: runner init TASK --bundle {quoted(bundle)} -o runs/NAME.yaml")
            its = "" if bundle == Path("bundle") else f" --bundle {quoted(bundle)}"
            say(f"      or, with a run file: runner submit runs/NAME.yaml{its} {to}")
        else:
            say(
                f"next: stage push {quoted(bundle)} {quoted(f'me@cluster:{bundle.name}')}   "
                "(or any transfer, then there: stage verify)"
            )
        if script:
            say(f"      then there: runner exec --bundle {quoted(bundle.name)} -- {script}")
