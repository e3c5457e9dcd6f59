"""The first steps are the trial of an automatic `batch.micro`.

Where they end because memory ran out, the ranks are started again with half of it and twice the
accumulation, until it fits or is 1. What did not fit is kept in the run folder: the next start of
the run begins with what did.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from runner.errors import human_count, say
from runner.job.host_memory import is_limited
from runner.job.plan import MicroBound, can_be_smaller, with_micro
from runner.launch.outcome import Outcome
from runner.launch.resolved import read_resolved, tried_with, write_bound, write_resolved
from runner.run_folder.heartbeat import tries
from runner.run_folder.layout import RunFolder


def halve_micro(folder: RunFolder, outcome: Outcome, environ: Mapping[str, str]) -> bool:
    """Arranges another attempt with half of `batch.micro`, where the first steps did not fit.

    A rank that was killed counts where a limit of memory may have been the reason.

    Args:
        folder: of the run.
        outcome: how the ranks of the last attempt ended.

    Returns:
        Whether to start the ranks again; says so, with the reason.
    """
    if outcome.kind != "no_memory" or (outcome.killed and not is_limited(environ)):
        return False
    resolved = read_resolved(folder)
    plan, config = resolved.plan, resolved.run.config
    if plan is None or not can_be_smaller(config, plan) or not tries(folder.logs):
        return False
    why = f"{plan.micro} did not fit ({outcome.cause})"
    bound = MicroBound(tried_with(resolved), plan.micro // 2, why)
    write_bound(folder, bound)
    smaller = with_micro(config, plan, bound)
    write_resolved(
        replace(resolved, attempt=resolved.attempt + 1, bound=bound, plan=None, device=None)
    )
    say(
        f"batch.micro: {why}; the {human_count(plan.world_size, 'rank')} start again with "
        f"{smaller.micro}, accumulation {smaller.accumulation}"
    )
    return True
