"""`runner train` and `runner prepare`: from a run file to running ranks.

The same command is first a launcher and then, started by the launcher, srun or mpirun, a rank. The
launcher checks, prepares the data and writes the run folder, once for all ranks; the rank trains.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

from runner import inputs as inputs_module
from runner import isolation, offline
from runner.child import in_child, runner_command
from runner.config.explain import choice_lines, left_out
from runner.data.prepare import check_together, is_prepared, prepare
from runner.data.recipe import recipes
from runner.disks import use_local_caches
from runner.errors import FULL_DISK, IncompleteError, StageError, UsageError, print_line, say
from runner.job import devices, node_local
from runner.job.check import check_everything
from runner.job.installed import check_installed, to_prepare, to_train
from runner.job.job import Job
from runner.job.plan import sequence_length
from runner.job.shapes import Device, ModelShape
from runner.job.tools import check_tools
from runner.job.transformers_tables import leave_torch_alone
from runner.launch import environment as ranks_environment
from runner.launch.environment import RANK_FLAG
from runner.launch.outcome import Ended, outcome_of
from runner.launch.rank import end_rank, find_role, run_rank
from runner.launch.start import start_ranks
from runner.processes import raise_limits
from runner.run_folder.heartbeat import PREPARE, Heartbeat
from runner.run_folder.run_lock import hold_run_folder
from runner.slurm.environment import SlurmJobEnvironment, tasks_per_node

_PREPARING = ("preparing the data", "Run it on a machine with more memory, then train.")
_CHECKING = ("checking the run", "Run it on a machine with more memory.")


def train(
    run: Job,
    processes: int | None,
    *,
    dry_run: bool,
    environ: Mapping[str, str],
    verbose: bool = False,
) -> int:
    """Trains: as a launcher or as a rank, whichever this process is.

    Args:
        processes: the number of ranks on this machine. None: one, or those of the Slurm job.
        dry_run: check and explain, but start nothing.
        verbose: whether details and all automatic choices are printed, too.

    Returns:
        The exit code.

    Raises:
        StageError: the run cannot work; raised before anything is launched.
    """
    offline.set_variables(os.environ)
    raise_limits()
    role = find_role(environ, processes)
    isolation.isolate(os.environ, _say_once(role, environ))
    check_all_installed(run, role)
    if role == "rank" and environ.get(RANK_FLAG) == "1":
        run_rank(run.folder, environ, partial(_train_as, run))
    if role == "rank":
        return _be_a_rank_of_others(run, environ, dry_run=dry_run, verbose=verbose)
    num_local = processes or 1
    _print_headline(run)
    finished = run.finished()
    is_over = bool(finished) and not dry_run  # then only what is wrong is worth a line
    tell: Callable[[str], None] = (lambda _line: None) if is_over else print_line
    device = _device(run, role, num_local, environ, tell)
    check_everything(run, world_size(role, num_local, environ), device).report(
        tell, verbose=verbose
    )
    if is_over:
        print_line("\n".join(finished))
        return 0
    _explain(run, verbose=verbose)
    if dry_run:
        print_line("\n".join([*run.held(environ), *finished, "dry run: nothing was started"]))
        return 0
    run.folder.make()
    with hold_run_folder(run.folder, environ):
        return _launch(run, role, num_local, environ)


def check_all_installed(run: Job, role: str) -> None:
    """Refuses to train where packages are missing, before anything is written.

    The ranks of a batch job may run another environment than its launcher, which then only has to
    prepare the data.

    Raises:
        UsageError: packages are missing; names them, and what to install.
    """
    config = run.config
    elsewhere = role == "batch" and (config.environment is not None or config.slurm.container)
    packages = to_prepare(config) if elsewhere else to_train(config)
    check_installed(config, run.inputs, packages, "training")


def _say_once(role: str, environ: Mapping[str, str]) -> Callable[[str], None]:
    """Prints in a launcher, and in rank 0 of another launcher than ours; else prints nothing."""
    rank = environ.get("RANK") or environ.get("SLURM_PROCID") or "0"
    prints = role != "rank" or (environ.get(RANK_FLAG) != "1" and rank == "0")
    return print_line if prints else lambda _line: None


def _print_headline(run: Job) -> None:
    print_line(
        f"{run.config.path}: {run.config.name}, run folder {run.folder.root} (all settings, with "
        "reasons: config.yaml in it, or -v)"
    )


def _launch(run: Job, role: str, num_local: int, environ: Mapping[str, str]) -> int:
    prepare_in_sandbox(run)
    run.write_config()
    for line in use_local_caches(os.environ):
        print_line(line)
    argv = rank_command(run, role, environ, "train", *rank_arguments(run, run.folder.root))
    hang_after_s = None if run.config.hang_after == "auto" else run.config.hang_after
    say("the ranks start with the import of torch: up to a minute where the disk is slow")
    processes = None if role == "batch" else num_local
    return start_ranks(argv, processes, run.folder, environ, hang_after_s=hang_after_s).exit_code


def rank_arguments(run: Job, output: Path, *more: str) -> list[str]:
    """The arguments of a command of `runner` with which a rank reads what its launcher read."""
    return [
        str(run.config.path),
        *("--bundle", str(run.bundle.absolute())),
        *("--output", str(output)),
        *more,
        *(argument for override in run.overrides for argument in ("--set", override)),
    ]


def rank_command(run: Job, role: str, environ: Mapping[str, str], *arguments: str) -> list[str]:
    """The command that starts a rank: in a job by the Python of the container or environment.

    Raises:
        StageError: the ranks would run another environment than the run file names.
    """
    prefix = environment_for_ranks(run, role, environ)
    argv = runner_command(*arguments, prefix=prefix)
    return [*run.config.slurm.container, *argv] if role == "batch" else argv


def environment_for_ranks(run: Job, role: str, environ: Mapping[str, str]) -> Path | None:
    """The prefix of the ranks' environment on their nodes; None: that of this process.

    Raises:
        StageError: the ranks would run another environment than the run file names.
    """
    wanted, environment = run.config.environment, run.inputs.environment
    if wanted is None or environment is None:
        return None
    if role == "batch":
        return node_local.arrange(wanted.node_local, environment, environ, print_line)
    node_local.check_running(environment)
    return None


def prepare_in_sandbox(run: Job) -> None:
    """Prepares the data in a child process that cannot open an internet socket.

    Returns at once if all stores exist.

    Raises:
        StageError: the child raised it, or was killed.
    """
    length, is_done = _prepared(run)
    if is_done:
        prepare_all(run, length, lambda _line: None)
    else:
        in_child(_prepare_offline, (run, length), *_PREPARING)


def _prepared(run: Job) -> tuple[int, bool]:
    """The tokens of a sequence, and whether all stores of the run exist."""
    length, _ = sequence_length(run.config, ModelShape.of(run.inputs.model.settings, None))
    wanted = recipes(run.config, run.inputs, length)
    every = [recipe for several in wanted.values() for recipe in several]
    return length, all(is_prepared(recipe, run.folder.stores) for recipe in every)


def check_and_prepare(run: Job) -> None:
    """Checks the run and prepares its data, in one child process.

    transformers is imported there only: that takes a second.

    Raises:
        StageError: as for `check_everything` and `prepare_in_sandbox`.
        UsageError: a package is missing.
    """
    check_installed(run.config, run.inputs, to_prepare(run.config), "preparing data")
    in_child(_check_and_prepare, (run,), *_PREPARING)


def _check_and_prepare(run: Job) -> None:
    check_everything(run, None, None).report(print_line)
    length, is_done = _prepared(run)
    (prepare_all if is_done else _prepare_offline)(run, length)


def _prepare_offline(run: Job, length: int) -> None:
    """Prepares the data, in a child process without network."""
    leave_torch_alone()
    if why_not := offline.close_network():
        print_line(f"no network sandbox around the preparation: {why_not}")
    try:
        prepare_all(run, length)
    except OSError as error:
        raise failed_to_prepare(error, run) from None


def prepare_all(run: Job, length: int, say: Callable[[str], None] = print_line) -> None:
    """Prepares the missing stores, in this process.

    Args:
        length: tokens of a sequence.
        say: prints a line for each store.

    Raises:
        StageError: as for `prepare` and `check_together`.
    """
    wanted = recipes(run.config, run.inputs, length)
    check_together(
        {
            role: [prepare(recipe, run.folder.stores, say) for recipe in several]
            for role, several in wanted.items()
        }
    )


def failed_to_prepare(error: OSError, run: Job) -> StageError:
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


def _be_a_rank_of_others(
    run: Job, environ: Mapping[str, str], *, dry_run: bool, verbose: bool
) -> int:
    """Trains as a rank that srun, torchrun or mpirun started.

    Rank 0 also does the launcher's work; the others wait for it.

    Returns:
        The exit code.

    Raises:
        StageError: the same for all ranks, before anything is done.
    """
    leads = ranks_environment.rank_number(environ) == 0
    say: Callable[[str], None] = print if leads else lambda _line: None
    if finished := run.finished():
        say("\n".join(finished))
        return 0
    if dry_run and not leads:
        return 0
    if dry_run:
        place = ranks_environment.rank_environment(environ)
        in_child(_check_as_launcher, (run, place, dict(environ), False, verbose), *_CHECKING)
        print_line("dry run: nothing was started")
        return 0
    run.folder.make()

    def lead_and_train(place: ranks_environment.RankEnvironment, heartbeat: Heartbeat) -> None:
        with _leading(run, place, heartbeat, environ, verbose) if leads else nullcontext():
            _train_as(run, place, heartbeat)
        stopped = (run.folder.root / ranks_environment.STOPPED).exists()
        outcome = outcome_of(Ended(in_job=False, saved=stopped))
        for line in outcome.messages:
            say(line)
        end_rank(outcome.exit_code)

    return run_rank(run.folder, environ, lead_and_train)


@contextmanager
def _leading(
    run: Job,
    place: ranks_environment.RankEnvironment,
    heartbeat: Heartbeat,
    environ: Mapping[str, str],
    verbose: bool,
) -> Iterator[None]:
    """Does the launcher's work in rank 0; its heartbeat shows the other ranks that it works."""
    with hold_run_folder(run.folder, environ):
        (run.folder.root / ranks_environment.STOPPED).unlink(missing_ok=True)
        with heartbeat.beating(PREPARE):
            in_child(_check_as_launcher, (run, place, dict(environ), True, verbose), *_CHECKING)
        run.write_config()
        yield


def _check_as_launcher(
    run: Job,
    place: ranks_environment.RankEnvironment,
    environ: Mapping[str, str],
    prepares: bool,
    verbose: bool,
) -> None:
    """Does what a launcher does before it starts ranks, in a child process of rank 0.

    A child, because a rank imports torch and a launcher must not.
    """
    _print_headline(run)
    environment_for_ranks(run, "local", environ)
    own_torch = run.config.environment is None
    device = devices.here(place.local_world_size, environ, own_torch=own_torch)
    check_everything(run, place.world_size, device).report(print_line, verbose=verbose)
    _explain(run, verbose=verbose)
    if prepares:
        prepare_in_sandbox(run)


def _train_as(run: Job, place: ranks_environment.RankEnvironment, heartbeat: Heartbeat) -> None:
    from runner.training.start import train as train_rank

    train_rank(run.config, run.inputs, run.folder, place, heartbeat)


def world_size(role: str, num_local: int, environ: Mapping[str, str]) -> int:
    """The number of ranks.

    Args:
        role: "batch" (srun starts the ranks) or "local".
        num_local: the number of ranks on this machine.

    Raises:
        UsageError: the role is "batch", but this is not a Slurm job.
    """
    if role == "local":
        return num_local
    job = SlurmJobEnvironment.from_environ(environ)
    if job is None:
        raise UsageError("this is not inside a Slurm job.", "Submit it with `runner submit`.")
    return job.num_nodes * tasks_per_node(job)


def _device(
    run: Job, role: str, num_local: int, environ: Mapping[str, str], tell: Callable[[str], None]
) -> Device | None:
    """The device of a rank on this machine, in a job its first node; None: not known here.

    Raises:
        UsageError: accelerators are requested that the ranks cannot use, or a compiler is missing.
    """
    ranks, own_torch = report_devices(run, role, num_local, environ, tell)
    if own_torch:
        check_tools(run.config)
    return devices.here(ranks, environ, own_torch=own_torch)


def report_devices(
    run: Job, role: str, num_local: int, environ: Mapping[str, str], say: Callable[[str], None]
) -> tuple[int, bool]:
    """Reports on this machine's accelerators.

    Returns:
        The number of ranks on this machine, and whether they use the torch that is installed here.

    Raises:
        UsageError: accelerators are requested that the ranks cannot use.
    """
    job = SlurmJobEnvironment.from_environ(environ) if role == "batch" else None
    elsewhere = run.config.environment is not None or (
        job is not None and run.config.slurm.container
    )
    ranks = tasks_per_node(job) if job else num_local
    for line in devices.notes(run.config.slurm, ranks, environ, own_torch=not elsewhere):
        say(line)
    return ranks, not elsewhere


def _explain(run: Job, *, verbose: bool) -> None:
    choices = run.config.explain()
    for line in choice_lines(choices) if verbose else left_out(choices):
        print_line(line)
