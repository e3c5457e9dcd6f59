"""A rank, from the start of its process to its work. Every rank of every kind of work is this.

Rank 0 leaves a brief for the others, which read no file to join it. Under another launcher than
ours rank 0 does the launcher's work first, while the others wait for the brief.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TYPE_CHECKING, NoReturn

from runner.errors import StageError, print_line
from runner.job.installed import is_light
from runner.job.job import Job
from runner.launch.outcome import Ended, outcome_of
from runner.launch.place import STOPPED, rank_number
from runner.launch.rank import Rank, run_rank
from runner.launch.resolved import Resolved, read
from runner.launch.train import check_all_installed, dry_run_of_rank_0, lead
from runner.run_folder.layout import RunFolder

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

    from runner.training.components.process_group import Brief, NoBrief

Work = Callable[[], Callable[..., None]]
"""Imports what a rank does with its trainer and the options of the work; that imports torch."""
Lead = Callable[[Rank], AbstractContextManager[Resolved | None]]
"""What rank 0 does before there is a brief, and while the ranks work; None: nothing is to do."""


def be_rank(folder: RunFolder, work: Work, environ: Mapping[str, str]) -> NoReturn:
    """Is a rank that our launcher started, and ends the process."""

    def begin(rank: Rank) -> None:
        _work(work, lambda _rank: nullcontext(read(folder)), rank)

    run_rank(folder, environ, begin)


def be_rank_of_others(
    load: Callable[[], Job],
    work: Work,
    environ: Mapping[str, str],
    *,
    dry_run: bool,
    verbose: bool,
) -> NoReturn:
    """Is a rank that srun, torchrun or mpirun started, and ends the process.

    Rank 0 also does the launcher's work; the others wait for it, and open no file of the run.

    Args:
        load: reads the run file and the bundle.
        dry_run: rank 0 checks and explains, and nothing is started.
        verbose: whether details and all automatic choices are printed, too.

    Raises:
        UsageError: packages are missing, or the rank does not know its place.
    """
    if is_light():
        check_all_installed(load(), None)
    if dry_run:
        if rank_number(environ) == 0:
            dry_run_of_rank_0(load(), environ, verbose=verbose)
        raise SystemExit(0)

    def begin(rank: Rank) -> int:
        folder = _work(work, lambda rank: lead(load, rank, environ, verbose=verbose), rank)
        stopped = folder is not None and (folder.root / STOPPED).exists()
        outcome = outcome_of(Ended(in_job=False, saved=stopped))
        for line in outcome.messages if rank.place.rank == 0 else ():
            print_line(line)
        return outcome.exit_code

    run_rank(None, environ, begin, lambda: load().folder)


def _work(work: Work, lead: Lead, rank: Rank) -> RunFolder | None:
    """Meets the other ranks and does the work.

    Returns:
        The run folder; None: there was nothing to do.

    Raises:
        StageError: as for `train`; or rank 0 failed before the ranks met.
    """
    from runner.training.components.process_group import NoBrief, open_store
    from runner.training.start import train

    store = open_store(rank)
    with ExitStack() as stack:
        brief, resolved = _brief(rank, store, lead, stack)
        if isinstance(brief, NoBrief):
            if brief.code:
                raise StageError(
                    f"rank 0 on {brief.host} failed before the ranks met.",
                    "Its own error is in its output.",
                    exit_code=brief.code,
                )
            return None
        heartbeat = rank.heartbeat or rank.enter(brief.folder)
        train(rank, heartbeat, brief, resolved, store, work())
    return brief.folder


def _brief(
    rank: Rank, store: Store, lead: Lead, stack: ExitStack
) -> tuple[Brief | NoBrief, Resolved | None]:
    """The brief; rank 0 makes it, and has what is decided so far."""
    from runner.training.components.process_group import (
        Brief,
        NoBrief,
        send_brief,
        wait_for_brief,
    )

    if rank.place.rank != 0:
        return wait_for_brief(store, rank.place.rank), None
    host, others = platform.node(), rank.place.world_size - 1
    try:
        resolved = stack.enter_context(lead(rank))
    except Exception as error:
        code = error.exit_code if isinstance(error, StageError) else 1
        send_brief(store, NoBrief(code, host), others)
        raise
    brief = Brief.of(resolved) if resolved else NoBrief(0, host)
    send_brief(store, brief, others)
    return brief, resolved
