"""The commands `check`, `prepare`, `submit`, `train` and `rank`: parse options and print."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from runner.cli.options import (
    include_option,
    processes_option,
    run_options,
    to_option,
    with_include,
)
from runner.from_stage import (
    StageError,
    UsageError,
    json_option,
    print_json,
    print_line,
    quiet_option,
    quoted,
    silent,
)

if TYPE_CHECKING:
    from runner.job.findings import Finding
    from runner.job.run import Run
    from runner.slurm.script import SbatchRequest


@click.command()
@run_options
@click.option(
    "--processes",
    type=click.IntRange(1),
    help="The number of ranks to check for. Default: as `slurm:` asks for.",
)
@include_option
@click.option(
    "--add",
    is_flag=True,
    help="Add to the manifest what an earlier start of a command missed; check nothing.",
)
@quiet_option
@json_option
def check(
    run: Path,
    bundle: Path,
    output: Path | None,
    overrides: tuple[str, ...],
    processes: int | None,
    include: tuple[str, ...],
    add: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Find, before anything is queued, what would fail.

    Checks assets, weights, tokenizer, texts, columns, lengths, batch, memory, rights, disk and
    Slurm. Prints all that is wrong at once.

    \b
    Example:
      runner check runs/my.yaml --bundle bundle
    """
    from runner import isolation, offline
    from runner.job.check import check_run, load_run
    from runner.job.command_run import CommandRun
    from runner.job.findings import document, errors_of, fact_line
    from runner.job.run import Asked

    if add:
        with silent(if_=quiet):
            print_line("\n".join(CommandRun.load(run, bundle, output, overrides).add_missing()))
        return
    offline.set_variables(os.environ)
    overrides = with_include(overrides, include)
    said: list[str] = []
    with silent(if_=quiet and not as_json):
        # Only says what `train` will do.
        isolation.isolate(dict(os.environ), said.append if as_json else print_line, [*sys.path])
        try:
            asked = Asked(processes=processes, ahead=True)
            loaded = load_run(run, bundle, output, overrides, asked)
            found = check_run(loaded)
            finished = loaded.finished
        except StageError as error:
            if not as_json:
                raise
            found, finished = list(errors_of(error)), []
        if as_json:
            found += map(fact_line, finished)
            result = document(found, said, run=str(run), bundle=str(bundle))
            print_json(result)
            sys.exit(result["exit_code"])
        _print_check(loaded, found)


def _print_check(run: Run, found: list[Finding]) -> None:
    from runner.job.findings import errors_in, except_warnings, in_order, raise_errors
    from runner.job.installed import lacking

    for finding in in_order(found):
        if not (finding.is_line and errors_in(found)):
            print_line(str(finding))
    raise_errors(found)
    if run.finished:
        print_line("\n".join(run.finished))
        return
    is_part = lacking() or run.why_not_here
    what = " in what was checked" if is_part else ""
    print_line(f"nothing found that would fail{what}{except_warnings(found)}")
    print_line(f"next: {_next(run)}")


def _next(run: Run) -> str:
    """The command that starts what was checked: a job, here or on a cluster; else ranks here.

    Where that Python cannot train, it is what gives it the packages.
    """
    from runner.inputs import environments
    from runner.job.installed import how_to_install, note_for_job
    from runner.job.run import Run
    from stage.carry.clusters import to_option

    if Path(".airlift/lock/step").exists():
        return "go.sh, which is at work here, submits it"
    processes, answer = run.asked.processes, run.known(Run.slurm_answer)
    outside = processes is None and "SLURM_JOB_ID" not in os.environ
    queue = outside and (answer is None or answer.has_cluster) and shutil.which("sbatch")
    can_go = outside and not queue and not run.is_elsewhere and run.config.manifest is not None
    to = to_option(run.config.path) if can_go else ""
    note = note_for_job(run.config, run.inputs, run.packages)
    if note and not to and (note.level == "warning" or not queue):
        return how_to_install(environments(run.inputs.bundle))
    ranks = f" --processes {processes}" if processes else ""
    return f"{run.command('submit' if queue or to else 'train')}{ranks} {to}".rstrip()


@click.command()
@run_options
@quiet_option
def prepare(
    run: Path, bundle: Path, output: Path | None, overrides: tuple[str, ...], quiet: bool
) -> None:
    """Check RUN, tokenise its data, and make its folder ready.

    `train` does it too, where it starts the ranks. Under torchrun, mpirun or a srun of yours, do it
    once before.

    \b
    Example:
      runner prepare runs/my.yaml --bundle bundle
    """
    from runner import isolation, offline
    from runner.job.training_run import TrainingRun
    from runner.launch.train import make_ready

    offline.set_variables(os.environ)
    with silent(if_=quiet):
        isolation.isolate(os.environ, print_line)
        make_ready(TrainingRun.load(run, bundle, output, overrides), os.environ)


@click.command()
@run_options
@processes_option
@click.option("--dry-run", is_flag=True, help="Check and explain; start nothing.")
@click.option("-v", "--verbose", is_flag=True, help="Also every automatic choice, with its reason.")
@quiet_option
def train(
    run: Path,
    bundle: Path,
    output: Path | None,
    overrides: tuple[str, ...],
    processes: int | None,
    dry_run: bool,
    verbose: bool,
    quiet: bool,
) -> None:
    """Train what RUN describes. Resumes from the newest checkpoint.

    Inside a Slurm job srun starts the ranks; on one machine, --processes. Under torchrun, mpirun or
    a srun of yours it is one rank, after `runner prepare`. A `command:` is started as a job does.

    \b
    Examples:
      runner train runs/my.yaml --bundle bundle --processes 2
      runner train runs/my.yaml --bundle bundle --dry-run
    """
    from runner.config.command_config import has_command
    from runner.job.training_run import TrainingRun
    from runner.launch.ranks import Start
    from runner.launch.train import set_up
    from runner.launch.train import train as train_run
    from runner.processes import outlive_readers

    outlive_readers()
    with silent(if_=quiet):
        if has_command(run, overrides):
            sys.exit(_start_here(run, bundle, output, overrides, processes, dry_run=dry_run))
        load = partial(TrainingRun.load, run, bundle, output, overrides)
        options: dict[str, Any] = {"dry_run": dry_run, "verbose": verbose}
        start = Start.of(os.environ, processes)
        if start is None:
            from runner.training.rank import join

            join(load, WORKS["train"], os.environ, **options)
        set_up(os.environ)
        sys.exit(train_run(load(), start, environ=os.environ, **options))


def _start_here(
    run: Path,
    bundle: Path,
    output: Path | None,
    overrides: tuple[str, ...],
    processes: int | None,
    *,
    dry_run: bool,
) -> int:
    """Starts the command of a run file, on this machine or in the job around it."""
    from runner.job.check import check_run
    from runner.job.command_run import CommandRun
    from runner.job.findings import report
    from runner.job.run import Asked
    from runner.launch.ranks import Start, as_launcher
    from runner.launch.start_command import on_machine, start_command
    from runner.launch.train import ranks_of

    start = as_launcher(Start.of(os.environ, processes), "train")
    loaded = CommandRun.load(run, bundle, output, overrides, Asked(ranks_of(start)))
    loaded = on_machine(loaded, start, processes)
    report(check_run(loaded), print_line)
    if loaded.finished:
        print_line("\n".join(loaded.finished))
        return 0
    if dry_run:
        print_line("dry run: nothing was started")
        return 0
    loaded.write_for_job()
    left = CommandRun.of_folder(loaded.folder.root, bundle)
    return start_command(on_machine(left, start, processes), start, os.environ)


@click.command(hidden=True)
@click.argument("folder", type=click.Path(path_type=Path))
def unpack(folder: Path) -> None:
    """Make the project whole that `runner submit --to` has sent into a folder."""
    from runner.run_folder.project import unpack_sent

    for line in unpack_sent(folder):
        print_line(line)


@click.command(hidden=True)
@click.option("--bundle", type=click.Path(path_type=Path), required=True)
@click.option("--output", type=click.Path(path_type=Path), required=True)
@click.option("--by-script", is_flag=True)
@click.option("--set", "overrides", multiple=True)
def launch(bundle: Path, output: Path, by_script: bool, overrides: tuple[str, ...]) -> None:
    """Start the command of the run in a folder. The script of its job does this.

    The settings of a run of a sweep are in its folder already: --set says them for people.
    """
    from runner.job.command_run import CommandRun
    from runner.launch.ranks import Start
    from runner.launch.start_command import start_command
    from runner.processes import outlive_readers

    outlive_readers()
    run = CommandRun.of_folder(output, bundle)
    sys.exit(start_command(run, Start.in_job(os.environ), os.environ, by_script=by_script))


WORDS = "runner.command"
"""Where the words after `--` are kept (`click.Context.meta`)."""


class OrCommand(click.Command):
    """A command that takes a user's own command after `--` in the place of RUN."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Takes the words after `--`; RUN is then the run file that they get."""
        if "--" in args:
            at = args.index("--")
            words = args[at + 1 :]
            args = args[:at]
            if words:
                from runner.remote.begin import run_file_of

                ctx.meta[WORDS] = words
                args = [*args, str(run_file_of(words))]
        return super().parse_args(ctx, args)


@click.command(cls=OrCommand)
@run_options
@click.option(
    "--dry-run",
    "--print",
    "only_print",
    is_flag=True,
    help="Print the sbatch script; submit nothing.",
)
@click.option(
    "--array",
    "axes",
    multiple=True,
    metavar="KEY=A,B,...",
    help="A sweep: a job array with one run for each value. May be repeated: every combination.",
)
@to_option(
    "From a laptop: fetch, send, verify and check there, then submit. A name of clusters.yaml, or "
    "USER@HOST:FOLDER."
)
@click.option(
    "--manifest",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="With --to: what to fetch. Default: `manifest:` of RUN.",
)
@click.option("--logout", is_flag=True, help="With --to: close the connection at the end.")
@click.option(
    "--add",
    is_flag=True,
    help="With --to: first write into the manifest what an earlier job of RUN missed.",
)
@include_option
@quiet_option
def submit(
    run: Path,
    bundle: Path,
    output: Path | None,
    overrides: tuple[str, ...],
    only_print: bool,
    axes: tuple[str, ...],
    to: str | None,
    manifest: Path | None,
    logout: bool,
    add: bool,
    include: tuple[str, ...],
    quiet: bool,
) -> None:
    """Write the sbatch script into the run folder and submit it.

    It checks the run first, as `runner check` does. With --to it does so on a cluster, by ssh, and
    brings there what is missing. Run it again after any interruption: it goes on.

    \b
    Examples:
      runner submit runs/my.yaml --bundle bundle
      runner submit runs/my.yaml --bundle bundle --dry-run      # the script
      runner submit runs/my.yaml --bundle bundle --array seed=1,2,3
      runner submit runs/my.yaml --to cluster
      runner submit --to cluster -- torchrun --nproc-per-node 4 train.py --lr 1e-4
    """
    overrides = with_include(overrides, include)
    words = click.get_current_context().meta.get(WORDS)
    if words and to is None:
        raise UsageError(
            "runner submit: a command after `--` goes with --to.",
            "Here: write it into a run file, as `command:`, and submit that.",
        )
    if to is not None:
        from runner.remote.begin import begin

        if words and not begin(words, run, to, dry_run=only_print):
            return
        if output is not None:
            raise UsageError(
                "runner submit --to: no --output: there, a run is in output/<name>.",
                "Set `name:` in the run file, or --set name=NAME.",
            )
        from runner.remote.submit_to import start

        options = {"add": add, "dry_run": only_print, "quiet": quiet, "logout": logout}
        sys.exit(start(run, to, bundle, manifest, overrides, axes, **options))
    if manifest is not None or logout or add:
        raise UsageError(
            "runner submit: --manifest, --add and --logout go with --to.",
            "runner submit RUN --to CLUSTER; without: runner submit RUN --bundle BUNDLE",
        )
    from runner import offline
    from runner.job.check import load_run
    from runner.job.plan import check_batch
    from runner.job.run import Asked
    from runner.job.submit import check_srun
    from runner.job.training_run import TrainingRun
    from runner.slurm.script import members, sbatch_script

    offline.set_variables(os.environ)
    asked = Asked(ahead=True, submits=True)
    loaded = load_run(run, bundle, output, overrides, asked)
    sweep = members(list(map(loaded.key_of_axis, axes))) if axes else ()
    # The runs of a sweep share one shell, which is tried once.
    runs = [
        loaded.member(member.name, member.overrides, tries_shell=number == 0)
        for number, member in enumerate(sweep)
    ]
    wanted = loaded.request_for(sweep)
    if only_print:
        check_srun(loaded.config)
        for checked in (one for one in runs or [loaded] if isinstance(one, TrainingRun)):
            check_batch(checked.config, wanted.nodes * wanted.tasks_per_node)
        click.echo(sbatch_script(wanted), nl=False)
        return
    with silent(if_=quiet):
        _submit(runs, loaded, wanted)


def _submit(runs: Sequence[Run], alone: Run, wanted: SbatchRequest) -> None:
    """Checks what is to be submitted and submits it, unless all of it is finished.

    Args:
        runs: the members of a sweep; empty: `alone`.

    Raises:
        StageError: a run cannot work, or another launcher trains in its folder.
    """
    from runner.job.check import check_run
    from runner.job.findings import report
    from runner.job.submit import submit as submit_job
    from runner.run_folder.run_lock import check_not_held

    for run in runs or [alone]:
        if runs:
            print_line(f"{run.folder.root.name}:")
        report(check_run(run), print_line)
        check_not_held(run.folder, os.environ)
        if run.finished:  # also of one that --quiet submits
            print_line("\n".join(run.finished), err=True)
    if all(run.finished for run in runs or [alone]):
        print_line("nothing was submitted")
        return

    def write_for_job() -> None:
        for run in runs:
            run.write_for_job(in_sweep=True)
        alone.write_for_job()

    job = submit_job(wanted, alone.partition, write_for_job)
    folder = quoted(alone.folder.root)
    watch = f"runner status {folder}" if runs else f"runner logs -f {folder}"
    print_line(f"submitted job {job}; follow it: {watch}")
    print_line(f"  script: {wanted.script}")
    log = str(wanted.log).replace("%j", str(job)).replace("%A", str(job)).replace("%a", "*")
    print_line(f"  log:    {log}")


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
NODES, COMMAND, PROLOG = "nodes", "command", "prolog"
"""Other kinds: ranks of a rehearsal, which look at their nodes before they meet; tasks of a user's
own command; and what Slurm runs before the tasks that such a command starts."""


@click.command(hidden=True)
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("work", type=click.Choice(sorted((*WORKS, NODES, COMMAND, PROLOG))))
def rank(folder: Path, work: str) -> None:
    """Be a rank of the run in FOLDER, and do WORK. The launcher starts it."""
    from runner import isolation, offline
    from runner.processes import outlive_readers
    from runner.run_folder.layout import RunFolder
    from runner.training.rank import be_rank

    outlive_readers()
    if work in (COMMAND, PROLOG):
        from runner.exec.command_task import become, lend

        (become if work == COMMAND else lend)(RunFolder(folder), os.environ)
        return
    offline.set_variables(os.environ)
    isolation.isolate(os.environ, lambda _line: None)
    if work == NODES:
        from runner.trials.rehearse_job import be_a_rank

        be_a_rank(RunFolder(folder), os.environ)
    be_rank(RunFolder(folder), WORKS[work], os.environ)
