"""`stage trace`: parses, runs the script, writes the manifest, prints."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from stage.errors import UsageError, as_shown
from stage.util.files import human_count


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("command", metavar="-- COMMAND...", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option(
    "-o",
    "--output",
    "manifest",
    default="manifest.yaml",
    show_default=True,
    type=click.Path(path_type=Path),
    help="The manifest to write; never one that is there.",
)
@click.option(
    "--endpoint",
    metavar="URL",
    help="The Hub or a mirror of it. Default: $HF_ENDPOINT, else the public one.",
)
@click.option(
    "--allow-code",
    is_flag=True,
    help="Allow the code that the script ran to run on the cluster too. Read it first.",
)
def trace(command: tuple[str, ...], manifest: Path, endpoint: str | None, allow_code: bool) -> None:
    """Run COMMAND once, and write the manifest of what it asks for.

    The manifest pins commits. Recorded are requests to the Hub (models, datasets, metrics of
    `evaluate`), plain http addresses, and of other https addresses the host.

    \b
    Example:
      stage trace -o my.yaml -- python their_script.py --max_steps 1
    """
    from stage.hub.library import check_hub_library

    check_hub_library()
    from stage.fetch.new_manifest import write_manifest
    from stage.fetch.sources import Sources
    from stage.trace.trace import trace as run
    from stage.util.files import check_folder_of, check_writable
    from stage.util.progress import Reporter

    if manifest.exists():
        raise UsageError(
            f"{manifest}: is there already, and is not overwritten.", "Give another name with -o."
        )
    check_folder_of(manifest)
    check_writable(manifest.parent)
    with Reporter() as reporter:
        sources = Sources(endpoint, reporter)
        traced = run(command, manifest, sources, os.environ, allow_code=allow_code)
    nothing = f"{command[0]} asked the Hub for nothing that a bundle can hold"
    if not traced.num_assets and traced.status:
        raise UsageError(
            f"{nothing}, and ended with {traced.status}.", "Its own error is above: fix that first."
        )
    if not traced.num_assets:
        raise UsageError(
            f"{nothing}.",
            "Does it ask in a child process with other variables, or set HF_ENDPOINT itself?",
        )
    write_manifest(manifest, traced.text)
    click.echo(as_shown(f"{manifest}: {human_count(traced.num_assets, 'asset')}"))
    if traced.status:
        click.echo(
            as_shown(
                f"warning: {command[0]} ended with {traced.status}; what it would have asked for "
                "later is not in the manifest"
            ),
            err=True,
        )
        sys.exit(1)
    click.echo(as_shown(f"next: stage fetch {manifest} -o bundle"))
