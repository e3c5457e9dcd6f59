"""`runner train` and `runner prepare`: from a run file to running ranks.

The launcher checks, prepares the data, decides what needs no device and writes the run folder, once
for all ranks. For ranks of srun, torchrun or mpirun, `runner prepare` does the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import replace
from pathlib import Path

from runner import inputs as inputs_module
from runner import isolation, offline
from runner.child import in_child
from runner.config.fields import choice_lines, of_ds_config
from runner.data.prepare import check_together, prepare
from runner.disks import use_local_caches
from runner.errors import FULL_DISK, say
from runner.from_stage import IncompleteError, StageError, print_line
from runner.job.check import check_run
from runner.job.findings import report
from runner.job.installed import check_installed, leave_torch_alone
from runner.job.run import Asked, RankCount
from runner.job.training_run import TrainingRun
from runner.launch.ranks import Start
from runner.launch.resolved import Resolved, write_resolved
from runner.launch.supervise import start_work
from runner.processes import raise_limits
from runner.run_folder.run_lock import hold_run_folder

_PREPARING = ("preparing the data", "Run it on a machine with more memory, then train.")


def set_up(environ: MutableMapping[str, str], say: Callable[[str], None] = print_line) -> None:
    """Sets this process up for a command that starts ranks, or for one of them.

    Args:
        environ: gets the variables.
        say: prints what is isolated.
    """
    offline.set_variables(environ)
    raise_limits()
    isolation.isolate(environ, say)


def train(
    run: TrainingRun,
    start: Start,
    *,
    dry_run: bool,
    environ: Mapping[str, str],
    verbose: bool = False,
) -> int:
    """Trains, as a launcher.

    Args:
        start: which ranks.
        dry_run: check and explain, but start nothing.
        verbose: whether details and all automatic choices are printed, too.

    Returns:
        The exit code.

    Raises:
        StageError: the run cannot work; raised before anything is launched.
    """
    check_all_installed(run, start)
    _print_headline(run)
    run = replace(run, asked=Asked(ranks_of(start)), environ=environ)
    finished = run.finished
    is_over = bool(finished) and not dry_run  # then only what is wrong is worth a line
    tell: Callable[[str], None] = (lambda _line: None) if is_over else print_line
    report(check_run(run), tell, verbose=verbose)
    if is_over:
        print_line("\n".join(finished))
        return 0
    _explain(run, verbose=verbose)
    if dry_run:
        lines = (run.held, *finished, "dry run: nothing was started")
        print_line("\n".join(filter(None, lines)))
        return 0
    run.folder.make()
    with hold_run_folder(run.folder, environ):
        return _launch(run, start, environ)


def ranks_of(start: Start) -> RankCount:
    """The ranks that a launcher starts, as the facts of a run know them."""
    return RankCount(start.world_size, start.on_node, "here" if start.job is None else "job")


def check_all_installed(run: TrainingRun, start: Start | None) -> None:
    """Refuses to train where packages are missing, before anything is written.

    The ranks of a batch job may run another environment than its launcher, which then only has to
    prepare the data; and the Python of a container prepares by itself.

    Raises:
        UsageError: packages are missing; names them, and what to install.
    """
    config = run.config
    in_job = start is not None and start.job is not None
    if in_job and run.python_of_ranks:
        return
    elsewhere = in_job and (config.environment is not None or config.slurm.around_ranks)
    packages = run.packages.of_launcher if elsewhere else run.packages.of_ranks
    check_installed(config, run.inputs, packages, "training")


def _print_headline(run: TrainingRun) -> None:
    print_line(
        f"{run.config.path}: {run.config.name}, run folder {run.folder.root} (all settings, with "
        "reasons: config.yaml in it, or -v)"
    )


def _launch(run: TrainingRun, start: Start, environ: Mapping[str, str]) -> int:
    prepare_in_sandbox(run, in_job=start.job is not None)
    run.write_config()
    for line in use_local_caches(os.environ):
        print_line(line)
    say("the ranks start with the import of torch: up to a minute where the disk is slow")
    return start_work(Resolved.of(run), "train", start, environ).exit_code


def prepare_in_sandbox(run: TrainingRun, *, in_job: bool) -> None:
    """Prepares the data in a child process that cannot open an internet socket.

    Returns at once if all stores exist.

    Args:
        in_job: whether the ranks of a job train on it; then it is their Python that prepares.

    Raises:
        StageError: the child raised it, or was killed.
    """
    if all(path.is_file() for several in run.stores.values() for path in several):
        prepare_all(run, lambda _line: None)
        return
    python = run.python_of_ranks if in_job else None
    in_child(prepare_offline, (run,), *_PREPARING, python or ())


def make_ready(run: TrainingRun, environ: Mapping[str, str]) -> None:
    """Checks the run, prepares its data, and leaves its folder ready for ranks of any launcher.

    Nothing in it depends on the machine or the number of ranks: rank 0 decides that.

    Raises:
        StageError: as for `check_run` and `prepare_in_sandbox`.
        UsageError: a package is missing; or another process works in the run folder.
    """
    if not run.python_of_ranks:
        check_installed(run.config, run.inputs, run.packages.of_launcher, "preparing data")
    _print_headline(run)
    report(check_run(run), print_line)
    if run.finished:
        print_line("\n".join(run.finished))
        return
    _explain(run, verbose=False)
    run.folder.make()
    with hold_run_folder(run.folder, environ):
        prepare_in_sandbox(run, in_job=True)
        run.write_config()
        write_resolved(Resolved.of(run))
    print_line(
        f"{run.folder.root} is ready: each rank of your launcher is `{run.command('train')}`"
    )


def prepare_offline(run: TrainingRun, say: Callable[[str], None] = print_line) -> None:
    """Prepares the data, in a child process without network. Arguments: as for `prepare_all`.

    Raises:
        StageError: as for `prepare_all`; or a disk fails.
    """
    leave_torch_alone()
    if why_not := offline.close_network():
        print_line(f"no network sandbox around the preparation: {why_not}")
    try:
        prepare_all(run, say)
    except OSError as error:
        raise failed_to_prepare(error, run) from None


def prepare_all(run: TrainingRun, say: Callable[[str], None] = print_line) -> None:
    """Prepares the missing stores, in this process.

    Args:
        say: prints a line for each store.

    Raises:
        StageError: as for `prepare` and `check_together`.
    """
    check_together(
        {
            role: [prepare(recipe, run.folder.stores, say) for recipe in several]
            for role, several in run.recipes.items()
        }
    )


def failed_to_prepare(error: OSError, run: TrainingRun) -> StageError:
    """Turns a system error during the preparation into one with a remedy.

    The cause is an unreadable bundle, a full disk, or a folder that cannot be written.
    """
    path = Path(os.fsdecode(error.filename)) if error.filename else run.folder.stores
    if path.is_relative_to(run.inputs.bundle):
        return inputs_module.unreadable(path, error.strerror or str(error))
    remedy = "Correct that (`ls -ld` shows who may write there)"
    if error.errno in FULL_DISK:
        remedy = "Free space or quota there"
    return IncompleteError(
        f"{path}: {error.strerror or error}.", f"{remedy}, then run the same command again."
    )


def _explain(run: TrainingRun, *, verbose: bool) -> None:
    config = run.config
    for line in (
        choice_lines(config.explain()) if verbose else of_ds_config(config.notes, config.explain())
    ):
        print_line(line)
