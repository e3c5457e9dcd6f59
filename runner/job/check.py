"""Everything that would end a run, found before a rank starts, without a GPU, in seconds.

`CHECKS` and `OF_COMMANDS` are the tables. A check is a function of the run that yields findings; it
is left out where a fact that it needs is not known. What a command asks (`Asked`) decides which
facts are known: `check` and `submit` look at the queue and the nodes of a job, `train` looks at
this machine.

To add a check: write a function in `checks`, and name it in a table there.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from runner.config.command_config import has_command
from runner.job.checks import any_run, command, training
from runner.job.command_run import CommandRun
from runner.job.findings import Check, Finding, after, examine
from runner.job.run import NO_RANKS, Asked, Run
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
OF_COMMANDS: tuple[Check[CommandRun], ...] = (
    *any_run.ANYWHERE,
    *command.ANYWHERE,
    *after((CommandRun.verification,), any_run.environment, any_run.quota),
    *any_run.IN_A_JOB,
)


def load_run(
    run_file: Path,
    bundle: Path,
    output: Path | None,
    overrides: Sequence[str],
    asked: Asked = NO_RANKS,
) -> Run:
    """Reads a run file of either kind, and resolves what it reads of the bundle.

    Raises:
        UsageError, DamageError: as for `TrainingRun.load` and `CommandRun.load`.
    """
    if has_command(run_file, overrides):
        return CommandRun.load(run_file, bundle, output, overrides, asked)
    return TrainingRun.load(run_file, bundle, output, overrides, asked)


def check_run(run: Run) -> list[Finding]:
    """Returns everything that is known about a run before it starts.

    The exit codes of its errors: 2, the run cannot work, or the checkpoint is of another run; 1,
    the bundle is known to be damaged; 3, it must be verified, and is not; 5, there is no space, no
    inodes or no quota.
    """
    if isinstance(run, CommandRun):
        return examine(run, OF_COMMANDS, (Run.shell,))
    assert isinstance(run, TrainingRun)
    return examine(run, CHECKS, BEGIN)
