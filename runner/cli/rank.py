"""The hidden command `rank`: what our launcher starts once for each rank."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import click


def _train() -> Callable[..., None]:
    from runner.training.setup import to_the_end

    return to_the_end


def _evaluate() -> Callable[..., None]:
    from runner.trials.workers import measure_checkpoint

    return measure_checkpoint


def _trial() -> Callable[..., None]:
    from runner.trials.workers import measure_trial

    return measure_trial


WORKS = {"train": _train, "evaluate": _evaluate, "trial": _trial}
"""The kinds of work, each with what imports it: a rank imports torch after its limits are set."""
NODES = "nodes"
"""Another kind, of a rehearsal: the ranks look at their nodes before they meet."""


@click.command(hidden=True)
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("work", type=click.Choice(sorted((*WORKS, NODES))))
def rank(folder: Path, work: str) -> None:
    """Be a rank of the run in FOLDER, and do WORK. The launcher starts it."""
    from runner import isolation, offline
    from runner.closed_pipe import outlive_readers
    from runner.run_folder.layout import RunFolder
    from runner.training.rank import be_rank

    outlive_readers()
    offline.set_variables(os.environ)
    isolation.isolate(os.environ, lambda _line: None)
    if work == NODES:
        from runner.trials.rehearse_job import be_a_rank

        be_a_rank(RunFolder(folder), os.environ)
    be_rank(RunFolder(folder), WORKS[work], os.environ)
