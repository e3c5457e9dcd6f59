"""The command `rehearse`: parses options and prints."""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path

import click

from runner.cli.tools import bundle_option
from runner.errors import StageError, as_shown


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@bundle_option
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="The run folder. Default: output/<name>. Nothing is left beside it.",
)
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a key of the run file."
)
@click.option(
    "--job",
    is_flag=True,
    help="Instead try the partition's nodes, in a job of five minutes: what they see and reach.",
)
@click.option(
    "--json", "as_json", is_flag=True, help="One JSON document on stdout, and nothing else there."
)
def rehearse(
    run: Path,
    bundle: Path,
    output: Path | None,
    overrides: tuple[str, ...],
    job: bool,
    as_json: bool,
) -> None:
    """Try RUN small and whole, in a minute: step, save, resume, evaluate, export.

    Two ranks on this machine's CPU, the model cut to two layers, in the run folder's file system.
    Everything is removed afterwards.
    """
    from runner.launch.train import Run
    from runner.rehearse.nodes import part
    from runner.rehearse.stages import Stages

    load = partial(Run.load, run, bundle, output, overrides)
    if job and part.is_part(os.environ):
        sys.exit(part.be_a_part(load, sys.argv[1:], os.environ))
    stages = Stages((lambda _line: None) if as_json else _print)
    error: StageError | None = None
    try:
        if job:
            from runner.rehearse.nodes.job import rehearse_in_job

            command = ["rehearse", str(run.absolute()), "--bundle", str(bundle.absolute()), "--job"]
            command += [word for text in overrides for word in ("--set", text)]
            loaded = load()
            command += ["--output", str(loaded.folder.root)]
            rehearse_in_job(loaded, command, os.environ, stages)
        else:
            from runner.rehearse.rehearsal import rehearse as rehearse_here

            stages.say(f"rehearsing {run}; nothing of it stays")
            rehearse_here(load(), os.environ, stages)
    except StageError as fault:
        if not as_json:
            raise
        error = fault
    if as_json:
        found = stages.document(error, run=str(run), bundle=str(bundle))
        click.echo(json.dumps(found, indent=1))
        sys.exit(int(found["exit_code"]))
    names = ", ".join(stage.name for stage in stages.ended)
    stages.say(f"rehearsed: {names} in {stages.seconds:.0f} s")


def _print(line: str) -> None:
    click.echo(as_shown(line))
    sys.stdout.flush()
