"""The command `evaluate`: parses options and prints."""

from __future__ import annotations

import os
from pathlib import Path

import click

from runner.cli.options import processes_option, run_options
from runner.errors import print_line, quiet_option, silent


@click.command()
@run_options
@processes_option
@click.option(
    "--checkpoint",
    metavar="NAME",
    help="newest, best, step-N, or none: the first weights. Default: newest, if there is one.",
)
@quiet_option
def evaluate(
    run: Path,
    bundle: Path,
    output: Path | None,
    overrides: tuple[str, ...],
    processes: int | None,
    checkpoint: str | None,
    quiet: bool,
) -> None:
    """Measure RUN on its validation split; train nothing.

    It takes the newest checkpoint of the run folder, or the model of the bundle where the run has
    not begun. The run folder stays as it is.

    \b
    Examples:
      runner evaluate runs/my.yaml --bundle bundle --checkpoint best
      runner evaluate runs/my.yaml --bundle bundle --set dataset.validation=test
    """
    from runner.job.training_run import TrainingRun
    from runner.trials.evaluate import evaluate as evaluate_run

    loaded = TrainingRun.load(run, bundle, output, overrides)
    with silent(if_=quiet):
        evaluate_run(loaded, checkpoint, processes, os.environ, print_line)
