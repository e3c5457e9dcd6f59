"""A rank, from the start of its process to its work. Every rank of every kind of work is this.

The run folder is ready before a rank starts: our launcher, or `runner prepare`, has written
`resolved.json` there. Each rank reads it; only the plan comes from rank 0.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, MutableMapping
from typing import NoReturn

from runner.errors import IncompleteError, StageError, print_line
from runner.job import node_local
from runner.job.training_run import TrainingRun
from runner.launch.outcome import STOPPED_AND_SAVED
from runner.launch.rank_process import Rank, note_on_inherited_rank_variables, run_rank
from runner.launch.ranks import RankInfo, Start, rank_numbers
from runner.launch.resolved import Resolved, check_ready, read_resolved
from runner.launch.train import check_all_installed, set_up, train
from runner.run_folder.layout import RunFolder

Work = Callable[[], Callable[..., None]]
"""Imports what a rank does with its trainer and the options of the work; that imports torch."""


def be_rank(folder: RunFolder, work: Work, environ: Mapping[str, str]) -> NoReturn:
    """Does the work of a rank whose run folder is ready, and ends the process.

    Raises:
        StageError: this node does not see the run folder.
    """
    if not folder.resolved.is_file():  # before the heartbeat, which would make the folder
        raise StageError(
            f"{platform.node()} does not see {folder.root}.",
            "Choose an --output on a disk that all nodes share.",
            exit_code=1,
        )
    resolved = read_resolved(folder)
    run_rank(folder, environ, lambda rank: _work(rank, resolved, work))


def _work(rank: Rank, resolved: Resolved, work: Work) -> int:
    """Does the work; returns the exit code."""
    from runner.training.setup import run_work

    run_work(rank, resolved, work())
    # Our launcher looks for this file by itself; of another one, the exit code is all that it sees.
    if rank.info.is_ours or not resolved.run.folder.stopped.exists():
        return 0
    if rank.info.rank == 0:
        print_line(STOPPED_AND_SAVED)
    return IncompleteError.exit_code


def join(
    load: Callable[[], TrainingRun],
    work: Work,
    environ: MutableMapping[str, str],
    *,
    dry_run: bool,
    verbose: bool,
) -> NoReturn:
    """Does the work of a rank that srun, torchrun or mpirun started, and ends the process.

    Each rank looks by itself whether the run folder is ready for what it was called with. So all of
    them end at once where it is not, and none waits for another.

    Args:
        load: reads the run file and the bundle.
        environ: gets the variables of a rank.
        dry_run: rank 0 checks and explains, and nothing is started.
        verbose: whether a dry run prints all automatic choices, too.

    Raises:
        StageError: the rank cannot begin. One rank of each node raises it; the others end with its
            exit code.
    """
    numbers = rank_numbers(environ)
    set_up(environ, prints=numbers.rank == 0)
    if dry_run:
        if numbers.rank != 0:
            raise SystemExit(0)
        info = RankInfo.of(environ)
        num_nodes = info.world_size // info.local_world_size
        start = Start(info.local_world_size, num_nodes=num_nodes)
        raise SystemExit(train(load(), start, dry_run=True, environ=environ, verbose=verbose))
    try:
        run = load()
        finished = run.finished
        if not finished:
            _check_can_begin(run)
    except StageError as error:
        if numbers.local_rank != 0:
            raise SystemExit(error.exit_code) from None
        if note := note_on_inherited_rank_variables(RankInfo.of(environ)):
            print_line(note, err=True)
        raise
    if finished:
        if numbers.rank == 0:
            print_line("\n".join(finished))
        raise SystemExit(0)
    be_rank(run.folder, work, environ)


def _check_can_begin(run: TrainingRun) -> None:
    """Checks that this Python can train the run, and that the run folder is ready.

    Raises:
        UsageError: packages are missing, this Python is not of the environment that the run file
            names, or as for `check_ready`.
    """
    check_all_installed(run, None)
    if run.inputs.environment is not None:
        node_local.check_running(run.inputs.environment)
    check_ready(run)
