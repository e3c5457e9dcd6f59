"""Everything that would end a run, found before a rank starts, without a GPU, in seconds.

`CHECKS` is the table. A check is a function of the run that yields findings; it is left out where a
fact that it needs is not known. What a command asks (`Asked`) decides which facts are known:
`check` and `submit` look at the queue and the nodes of a job, `train` looks at this machine.

To add a check: write a function in `checks`, and name it in a table there.
"""

from __future__ import annotations

from runner.job.checks import any_run, training
from runner.job.findings import Check, Finding, after, examine
from runner.job.training_run import TrainingRun

CHECKS: tuple[Check[TrainingRun], ...] = (
    *any_run.ANYWHERE,
    *training.ANYWHERE,
    *after((TrainingRun.verification,), any_run.environment),
    *training.IN_A_JOB,
    *any_run.IN_A_JOB,
)
# Each takes seconds in another process.
BEGIN = (TrainingRun.shell, TrainingRun.model_look, TrainingRun.texts_look)


def check_run(run: TrainingRun) -> list[Finding]:
    """Returns everything that is known about a run before it starts.

    The exit codes of its errors: 2, the run cannot work, or the checkpoint is of another run; 1,
    the bundle is known to be damaged; 3, it must be verified, and is not; 5, there is no space, no
    inodes or no quota.
    """
    return examine(run, CHECKS, BEGIN)
