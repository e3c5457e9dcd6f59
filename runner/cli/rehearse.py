"""The command `rehearse`: parses options and prints."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

import click

from runner.cli.options import run_options
from runner.errors import (
    IncompleteError,
    print_line,
    quiet_option,
)


@click.command()
@run_options
@click.option(
    "--job",
    is_flag=True,
    help="Instead try the partition's nodes, in a job of five minutes: what they see and reach.",
)
@quiet_option
def rehearse(
    run: Path,
    bundle: Path,
    output: Path | None,
    overrides: tuple[str, ...],
    job: bool,
    quiet: bool,
) -> None:
    """Try RUN small and whole, in a minute: a step, a save, an export.

    Also a resume and an evaluation. Two ranks on this machine's CPU, the model cut to two
    layers, in the run folder's file system. Everything is removed afterwards.

    \b
    Examples:
      runner rehearse runs/my.yaml --bundle bundle
      runner rehearse runs/my.yaml --bundle bundle --job   # the nodes
    """
    from runner.job.training_run import TrainingRun
    from runner.trials import node_part as part
    from runner.trials.stages import Stages

    load = partial(TrainingRun.load, run, bundle, output, overrides)
    if job and part.is_part(os.environ):
        sys.exit(part.be_its_launcher(load, os.environ))
    stages = Stages((lambda _line: None) if quiet else _print)
    try:
        if job:
            from runner.trials.rehearse_job import rehearse_in_job

            rehearse_in_job(load(), os.environ, stages)
        else:
            from runner.trials.rehearse import rehearse as rehearse_here

            stages.say(f"rehearsing {run}; nothing is kept")
            rehearse_here(load(), os.environ, stages)
    except KeyboardInterrupt:
        if job:
            raise
        what = "Interrupted. A rehearsal leaves nothing behind."
        raise IncompleteError(what, "Run the same command again.") from None
    names = ", ".join(stage.name for stage in stages.ended)
    stages.say(f"rehearsed: {names} in {stages.seconds:.0f} s")


def _print(line: str) -> None:
    print_line(line)
    sys.stdout.flush()
